"""Between text and tokens: a model folder's tokenizer and chat template, and text out of tokens as they come."""
