"""What is raised when this host cannot run the guest; its text says what to install."""


class GuestUnavailable(Exception):
    """The guest cannot be had here."""
