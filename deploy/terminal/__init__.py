"""What commands about a running cluster share: how to ask its gateway, call its workers, print, and end."""
