"""Functions that runs of the tests name in their settings."""

from rlpost.rollout.examples.calculator import with_results
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample


async def asks_by_a_digit(
    builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
) -> Sample:
    """The calculator, called by what the tiny model surely writes: it has never learned to ask with
    "=".
    """
    return await with_results(builder, prompt, calls=tuple("0123456789"))
