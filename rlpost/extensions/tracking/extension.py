"""The row of mirrors of metrics."""

from rlpost.config.extensions import Extension, Mirror

EXTENSION = Extension(
    name="tracking",
    follow_engines="rlpost.extensions.tracking.engine_targets:follow_engines",
    mirrors={
        "use_tensorboard": Mirror("rlpost.extensions.tracking.tensorboard:open_mirror"),
        "use_prometheus": Mirror("rlpost.extensions.tracking.prometheus:open_mirror"),
        "use_wandb": Mirror(
            "rlpost.extensions.tracking.wandb:open_mirror",
            check="rlpost.extensions.tracking.wandb:check_key",
        ),
    },
    moved={
        **{
            f"rlpost.observe.{name}": f"rlpost.extensions.tracking.{name}"
            for name in ("prometheus", "wandb")
        },
        "rlpost.observe.mirrors.TensorBoardWriter": "rlpost.extensions.tracking.tensorboard.TensorBoardWriter",
    },
)
