"""The recipe that Megatron-core derives a class from when it is imported."""


class DelayedScaling:
    """Scales from a history of largest values."""

    def __init__(self, **options: object) -> None:
        self.options = options
