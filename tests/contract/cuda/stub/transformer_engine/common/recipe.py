"""The recipe that Megatron-core derives a class from when it is imported."""


class DelayedScaling:
    """FP8 scales from a history of absolute maxima."""

    def __init__(self, **options: object) -> None:
        self.options = options
