"""Functions that the settings of test runs name."""

from rlpost.rollout.examples.calculator import with_results
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample


async def asks_by_a_digit(
    builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
) -> Sample:
    """Call the calculator at every digit, which the tiny model writes often; it has not learned to
    write "=".
    """
    return await with_results(builder, prompt, calls=tuple("0123456789"))
