"""A resolved config: its derived numbers and its features. No torch here."""
