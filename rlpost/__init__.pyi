# Written by tools/make_docs.py.
from rlpost.algorithm.loss_settings import LossSettings as LossSettings
from rlpost.algorithm.objective import Tokens as Tokens
from rlpost.config.load import load as load
from rlpost.errors import ConfigError as ConfigError
from rlpost.errors import GradingLost as GradingLost
from rlpost.extensions import *  # noqa: F403
from rlpost.models.family import Family as Family
from rlpost.rollout.response_builder import ResponseBuilder as ResponseBuilder
from rlpost.rollout.sampling import SamplingParams as SamplingParams
from rlpost.types import Prompt as Prompt
from rlpost.types import Sample as Sample
from rlpost.types import SampleGroup as SampleGroup
from rlpost.types import ScoredSample as ScoredSample
from rlpost.types import Unfinished as Unfinished

__version__: str
