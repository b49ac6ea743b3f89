"""Images of prompts: files by hash, their bounds, and how a model's processor cuts them into patches."""
