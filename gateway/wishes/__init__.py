"""What clients may ask: bodies checked field by field, and what they come to as tokens, limits and grammars."""
