"""One SGLang server: its process, its HTTP interface, its weights, and the start of an engine job."""
