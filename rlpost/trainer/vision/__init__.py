"""Images of prompts in the trainer: the encoder, and the rows that take its features."""
