"""Supervised fine-tuning: responses of the data as samples."""
