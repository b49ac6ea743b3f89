"""The rotary embedding."""
