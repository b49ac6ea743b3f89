"""SGLang engines behind a router, generation, evaluation."""
