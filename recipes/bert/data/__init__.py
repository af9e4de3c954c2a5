"""Data of the recipe: text, tokenizers, masked samples of a token cache, and tables for classification."""
