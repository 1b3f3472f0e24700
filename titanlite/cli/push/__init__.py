"""`titanlite push`: weights with a card, on the hub of Hugging Face."""
