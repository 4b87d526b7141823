"""Between text and tokens, and between the text of a message and its parts."""
