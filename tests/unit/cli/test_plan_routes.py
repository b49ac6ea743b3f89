"""``rlpost plan`` says what the engines' choice of experts costs in memory."""

from rlpost.cli.plan import main


def rows(capsys, *flags):
    main(["glm45_355b", "--gpu-memory", "80GB", *flags])
    return " ".join(capsys.readouterr().out.split())


def test_routes_of_the_flagship_have_their_price(capsys):
    """89 MoE layers of 8 experts, 1,024 answers of at most 33,792 tokens; SGLang keeps 92 layers of
    8 x 4 bytes.
    """
    shown = rows(capsys, "--use-rollout-routing-replay", "true")
    assert "712 bytes a token: at most 24.6 GB a step in the driver" in shown
    kv_tokens = int(shown.split(" tokens an engine")[0].split()[-1].replace(",", ""))
    assert (
        f"{kv_tokens * 92 * 8 * 4 / 1e9:.1f} GB of host memory for each GPU of an engine" in shown
    )
    assert "bytes a token" not in rows(capsys)
