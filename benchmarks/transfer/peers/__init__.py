"""Other transfer engines, each used as its documentation says, from Python."""
