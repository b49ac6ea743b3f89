"""Importer and exporter on one rank, with a plain module in place of Megatron's."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rlpost.config.load import load
from rlpost.errors import CheckpointError, WeightError
from rlpost.models.families import family
from rlpost.models.names import Dimensions
from rlpost.trainer import weight_files
from rlpost.trainer.weights.box_exchange import BoxExchange
from rlpost.trainer.weights.exporter import Exporter, describe
from rlpost.trainer.weights.folder_export import _Files, export_folder
from rlpost.trainer.weights.importer import HuggingFaceFolder, import_weights
from rlpost.trainer.weights.inventory import Groups, Inventory
from rlpost.trainer.weights.safetensors_files import TensorFile
from rlpost.trainer.weights.whole_tensors import weights_hash
from tests.ports import free_port
from tests.unit.trainer.weights import quantised_ranks
from tests.unit.trainer.weights.quantised_ranks import (
    WORLD,
    Case,
    full,
    hugging_face,
    quantisation,
)
from tests.weights_hash import hash_of

DIMS = Dimensions(num_query_groups=2, head_dim=4, vocab_size=11)
HIDDEN, ROWS = 6, 10
MEGATRON_SHAPES = {
    "embedding.word_embeddings.weight": (11, HIDDEN),
    "decoder.layers.0.self_attention.linear_qkv.weight": (2 * (3 + 2) * 4, HIDDEN),
    "decoder.layers.0.mlp.linear_fc1.weight": (2 * ROWS, HIDDEN),
    "decoder.layers.0.mlp.linear_fc2.weight": (HIDDEN, ROWS),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (11, HIDDEN),
}
HUGGING_FACE_SHAPES = {
    "model.embed_tokens.weight": (11, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (24, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (8, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (8, HIDDEN),
    "model.layers.0.mlp.gate_proj.weight": (ROWS, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (ROWS, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, ROWS),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (11, HIDDEN),
}


class OneRank:
    """A process group of one: no collective is ever reached."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def megatron_model(*, tied: bool = False) -> torch.nn.Module:
    model = torch.nn.Module()
    for name, shape in MEGATRON_SHAPES.items():
        if tied and name == "output_layer.weight":
            continue
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
    model.get_submodule("decoder.layers.0").layer_number = 1
    return model


def inventory_of(model: torch.nn.Module, architecture: str = "Qwen3ForCausalLM") -> Inventory:
    groups = Groups(OneRank(), OneRank(), OneRank(), OneRank())
    tied = not hasattr(model, "output_layer")
    return Inventory([model], family=family(architecture), dims=DIMS, groups=groups, tied=tied)


def write_folder(
    folder: Path, names: list[str] | None = None, *, num_files: int = 1
) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with random weights, in one file or with an index."""
    names = list(HUGGING_FACE_SHAPES) if names is None else names
    tensors = {name: torch.randn(HUGGING_FACE_SHAPES.get(name, (2,))) for name in names}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"})
    )
    (folder / "tokenizer.json").write_text("{}")
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    file_of = {
        name: f"part-{number % num_files}.safetensors" for number, name in enumerate(tensors)
    }
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return tensors


def filled(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    import_weights(inventory_of(model), HuggingFaceFolder(folder))
    return model


def exporter_of(model: torch.nn.Module) -> Exporter:
    return Exporter(inventory_of(model))


def test_an_export_has_the_bound_on_images_of_its_run(tmp_path):
    write_folder(tmp_path, num_files=1)
    sizes = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
    processor = {"image_processor_type": "Qwen2VLImageProcessorFast", **sizes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    exporter = exporter_of(filled(megatron_model(), tmp_path))
    for most, expected in ((None, 16777216), (262144, 262144)):
        values = {
            "checkpoint": {"hf_checkpoint": str(tmp_path)},
            "rollout": {"image_max_pixels": most},
        }
        out, config = tmp_path / str(most), load([], values).config
        description = SimpleNamespace(
            file_config=json.loads((tmp_path / "config.json").read_text())
        )
        weight_files.export_merged(exporter, out, description, config)
        exported = json.loads((out / "preprocessor_config.json").read_text())
        assert exported["size"] == sizes["size"] | {"longest_edge": expected}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("shard_bytes", [600, 10**9])
def test_weights_survive_import_and_export_in_any_number_of_files(tmp_path, num_files, shard_bytes):
    tensors = write_folder(tmp_path, num_files=num_files)
    exporter = exporter_of(filled(megatron_model(), tmp_path))
    out = tmp_path / "out"
    export_folder(exporter, out, template=tmp_path, shard_bytes=shard_bytes)
    found = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    index = out / "model.safetensors.index.json"
    assert index.exists() == (shard_bytes == 600)
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert all(name in load_file(out / file) for name, file in weight_map.items())


@pytest.fixture
def exchanged(monkeypatch):
    """For each bucket that is exchanged, the number of buckets."""
    counts = []
    transfer = BoxExchange.transfer

    def counted(boxes, operations):
        counts.append(len(boxes))
        transfer(boxes, operations)

    monkeypatch.setattr(BoxExchange, "transfer", counted)
    return counts


def fails(*_, **__):
    raise OSError("stale file handle")


def test_a_template_that_cannot_be_read_fails_before_any_exchange(tmp_path, monkeypatch, exchanged):
    """On every rank: none waits for another one in an exchange."""
    write_folder(tmp_path)
    exporter = exporter_of(filled(megatron_model(), tmp_path))
    monkeypatch.setattr("rlpost.trainer.weights.folder_export._not_exchanged", fails)
    with pytest.raises(CheckpointError, match="stale file handle"):
        export_folder(exporter, tmp_path / "out", template=tmp_path, shard_bytes=600)
    assert not exchanged and not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_written_ends_the_exchange(tmp_path, monkeypatch, exchanged):
    """A bucket is written while the next one is exchanged."""
    write_folder(tmp_path)
    exporter = exporter_of(filled(megatron_model(), tmp_path))
    monkeypatch.setattr(TensorFile, "write", fails)
    with pytest.raises(CheckpointError, match="stale file handle"):
        export_folder(
            exporter, tmp_path / "out", template=tmp_path, shard_bytes=600, bucket_bytes=300
        )
    assert len(exchanged) == 2 < exchanged[0]
    assert not list((tmp_path / "out").glob("model*.safetensors"))


@pytest.mark.parametrize("lost", [slice(None, 1), slice(None)])
def test_an_export_without_a_tensor_fails(tmp_path, monkeypatch, lost):
    """A file that lacks one stays without a name, and one that lacks all is not created."""
    names = list(write_folder(tmp_path))[lost]
    exporter = exporter_of(filled(megatron_model(), tmp_path))
    write = _Files.write

    def write_others(files, tensors):
        write(files, {name: tensors[name] for name in tensors.keys() - set(names)})

    monkeypatch.setattr(_Files, "write", write_others)
    count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    with pytest.raises(CheckpointError, match=rf"{count} did not .*, {min(names)} first"):
        export_folder(exporter, tmp_path / "out", template=tmp_path, shard_bytes=600)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_an_export_carries_tokenizer_and_configuration_with_the_dtype_of_its_weights(tmp_path):
    write_folder(tmp_path)
    export_folder(
        exporter_of(filled(megatron_model(), tmp_path)),
        tmp_path / "out",
        template=tmp_path,
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("max_bytes", [1, 300, 700, 10**9])
def test_buckets_hold_every_tensor_once_in_order_and_keep_to_the_limit(max_bytes):
    exporter = exporter_of(megatron_model())
    plan = exporter.plan(max_bytes)
    described = [describe(bucket) for bucket in plan]
    shapes = {
        name: shape for one in described for name, shape in zip(one.names, one.shapes, strict=True)
    }
    assert shapes == HUGGING_FACE_SHAPES
    assert [name for one in described for name in one.names] == [
        n for e in exporter.inventory.entries for n in e.hugging_face
    ]
    for bucket in plan:
        assert len(bucket) == 1 or sum(entry.num_bytes for entry in bucket) <= max_bytes
    if max_bytes == 1:
        assert len(plan) == len(exporter.inventory.entries)


def test_gathered_tensors_match_the_description_of_their_bucket():
    for bucket in (exporter := exporter_of(megatron_model())).plan(700):
        tensors, described = exporter.gather(bucket), describe(bucket)
        assert tuple(tensors) == described.names
        assert tuple(tuple(tensor.shape) for tensor in tensors.values()) == described.shapes
        assert all(
            tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors.values()
        )
        assert set(described.dtypes) == {"float32"}


def test_the_hash_depends_on_the_weights_and_not_on_the_buckets(tmp_path):
    write_folder(tmp_path)
    model = filled(megatron_model(), tmp_path)
    before = weights_hash(inventory_of(model), max_bytes=10**9)
    assert weights_hash(inventory_of(model), max_bytes=300) == before
    with torch.no_grad():
        model.get_parameter("decoder.final_layernorm.weight")[3] += 1e-6
    assert weights_hash(inventory_of(model), max_bytes=10**9) != before


def test_a_tied_model_has_no_other_output_layer(tmp_path):
    """transformers#42612: the output layer of a folder was replaced by its embedding in silence."""
    tensors = write_folder(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    with pytest.raises(WeightError, match=r"lm_head\.weight that differs .* set it to false"):
        filled(megatron_model(tied=True), tmp_path)
    copied = tensors | {"lm_head.weight": embedding.clone()}
    save_file(copied, tmp_path / "model.safetensors")
    model = filled(megatron_model(tied=True), tmp_path)
    assert torch.equal(model.get_parameter("embedding.word_embeddings.weight").detach(), embedding)


@pytest.mark.parametrize("finer", [torch.float32, torch.float16])
def test_weights_with_more_bits_than_the_others_are_named(tmp_path, caplog, finer):
    """ms-swift#9412: those of Qwen3.5 in float32 were trained in bfloat16 in silence."""
    tensors = write_folder(tmp_path)
    model = megatron_model().to(torch.bfloat16)
    filled(model, tmp_path)
    assert not caplog.messages, "a folder in float32"
    norm = "model.norm.weight"
    mixed = {
        name: one.to(finer if name == norm else torch.bfloat16) for name, one in tensors.items()
    }
    save_file(mixed, tmp_path / "model.safetensors")
    filled(model, tmp_path)
    (message,) = caplog.messages
    assert "1 weight of this rank, model.norm.weight first" in message and "bfloat16" in message

    class WithNewWeight(HuggingFaceFolder):
        """As for the value head of a critic, which the folder of a policy lacks."""

        def read(self, name, *, expert=None):
            return tensors[norm] if name == norm else super().read(name, expert=expert)

    del mixed[norm]
    save_file(mixed, tmp_path / "model.safetensors")
    import_weights(inventory_of(model), WithNewWeight(tmp_path))
    assert len(caplog.messages) == 1


def test_a_missing_tensor_is_named(tmp_path):
    write_folder(tmp_path, [name for name in HUGGING_FACE_SHAPES if "up_proj" not in name])
    with pytest.raises(WeightError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        filled(megatron_model(), tmp_path)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Glm4MoeForCausalLM"])
def test_an_unused_tensor_is_named(tmp_path, architecture):
    """Also in a family with layers after the last, where config.json has too few layers."""
    write_folder(tmp_path, [*HUGGING_FACE_SHAPES, "model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(
        WeightError, match=r"1 tensors that .*'model\.layers\.1\.mlp\.up_proj\.weight'"
    ):
        inventory = inventory_of(megatron_model(), architecture)
        import_weights(inventory, HuggingFaceFolder(tmp_path))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    write_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": torch.ones(HIDDEN + 1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(WeightError, match=r"model\.norm\.weight .*\(7,\).*\(6,\)"):
        filled(megatron_model(), tmp_path)


@pytest.mark.parametrize("vocab_size", [10, 12])
def test_a_vocabulary_of_other_size_is_no_padding(tmp_path, vocab_size):
    """With two tensor-parallel ranks, 11 rows are padded to the 12 of either."""
    write_folder(tmp_path)
    inventory = inventory_of(megatron_model())
    inventory.dims = dataclasses.replace(DIMS, vocab_size=vocab_size)
    with pytest.raises(
        WeightError, match=f"has 11 rows, and config.json vocab_size = {vocab_size}"
    ):
        import_weights(inventory, HuggingFaceFolder(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_without_scales_are_refused(tmp_path, dtype):
    tensors = write_folder(tmp_path)
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"].to(dtype)}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightError, match=r"model\.norm\.weight is stored as (int8|float8_e4m3fn) without"
    ):
        filled(megatron_model(), tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor"):
        filled(megatron_model(), tmp_path)


def test_extra_layers_of_a_family_are_exported_unchanged(tmp_path):
    tensors = write_folder(tmp_path, [*HUGGING_FACE_SHAPES, "model.layers.1.eh_proj.weight"])
    inventory = inventory_of(megatron_model(), "Glm4MoeForCausalLM")
    import_weights(inventory, HuggingFaceFolder(tmp_path))
    export_folder(Exporter(inventory), tmp_path / "out", template=tmp_path)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])


def test_a_transformer_engine_model_imports_and_exports_the_same_tensors(tmp_path):
    """Norms inside the linear layers that follow them."""
    names = [
        *HUGGING_FACE_SHAPES,
        *(f"model.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    ]
    tensors = write_folder(tmp_path, names)
    model = megatron_model()
    for module in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        owner = model.get_submodule(f"decoder.layers.0.{module}")
        owner.register_parameter("layer_norm_weight", torch.nn.Parameter(torch.zeros(2)))
    exporter = exporter_of(filled(model, tmp_path))
    fused = model.get_parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    assert torch.equal(fused.detach(), tensors["model.layers.0.post_attention_layernorm.weight"])
    (bucket,) = exporter.plan(10**9)
    found = exporter.gather(bucket)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_grouped_experts_import_and_export_the_tensors_of_single_experts(tmp_path):
    """TransformerEngine keeps the experts of a rank in one module, a numbered weight for each."""
    shapes = {"gate_proj": (ROWS, HIDDEN), "up_proj": (ROWS, HIDDEN), "down_proj": (HIDDEN, ROWS)}
    experts = {
        f"model.layers.0.mlp.experts.{number}.{part}.weight": torch.randn(shape)
        for number in range(2)
        for part, shape in shapes.items()
    }
    write_folder(tmp_path, [name for name in HUGGING_FACE_SHAPES if ".mlp." not in name])
    save_file(load_file(tmp_path / "model.safetensors") | experts, tmp_path / "model.safetensors")
    model = megatron_model()
    for layer, shape in (("linear_fc1", (2 * ROWS, HIDDEN)), ("linear_fc2", (HIDDEN, ROWS))):
        grouped = torch.nn.Module()
        for number in range(2):
            grouped.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(shape)))
        mlp = model.get_submodule("decoder.layers.0.mlp")
        delattr(mlp, layer)
        if not hasattr(mlp, "experts"):
            mlp.add_module("experts", torch.nn.Module())
        mlp.experts.add_module(layer, grouped)
    groups = Groups(OneRank(), OneRank(), OneRank(), OneRank())
    dims = dataclasses.replace(DIMS, num_experts=2)
    inventory = Inventory(
        [model], family=family("Qwen3MoeForCausalLM"), dims=dims, groups=groups, tied=False
    )
    import_weights(inventory, HuggingFaceFolder(tmp_path))
    (bucket,) = Exporter(inventory).plan(10**9)
    found = Exporter(inventory).gather(bucket)
    assert all(torch.equal(found[name], tensor) for name, tensor in experts.items())


def test_an_import_holds_the_tensors_of_one_parameter_at_a_time(tmp_path, monkeypatch):
    """Measured: bytes read in all, and the most that were alive at once."""
    write_folder(tmp_path)
    alive = {"now": 0, "most": 0, "read": 0}
    read = HuggingFaceFolder.read

    def watched(self: HuggingFaceFolder, name: str, **part: Any) -> torch.Tensor:
        tensor = read(self, name, **part)
        for key in ("now", "read"):
            alive[key] += tensor.nbytes
        alive["most"] = max(alive["most"], alive["now"])
        weakref.finalize(tensor, lambda size=tensor.nbytes: alive.update(now=alive["now"] - size))
        return tensor

    monkeypatch.setattr(HuggingFaceFolder, "read", watched)
    model = megatron_model()
    filled(model, tmp_path)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert alive["read"] == sum(sizes), "each tensor is read once"
    assert alive["most"] <= 2 * max(sizes) < sum(sizes), "the next parameter's and the one before"
    assert alive["now"] <= max(sizes)


def test_a_rank_reads_only_the_tensors_of_its_stage(tmp_path, monkeypatch):
    """A stage with the last layers only: neither the embedding nor a layer before it is touched."""
    write_folder(tmp_path)
    names: list[str] = []
    read = HuggingFaceFolder.read
    monkeypatch.setattr(
        HuggingFaceFolder,
        "read",
        lambda self, name, **part: names.append(name) or read(self, name, **part),
    )
    inventory = inventory_of(megatron_model())
    inventory.held = {
        name: held for name, held in inventory.held.items() if not name.startswith("embedding")
    }
    import_weights(inventory, HuggingFaceFolder(tmp_path))
    assert set(names) == set(HUGGING_FACE_SHAPES) - {"model.embed_tokens.weight"}


def test_an_export_has_the_configuration_that_the_model_was_trained_with(tmp_path):
    write_folder(tmp_path)
    exporter, config = (
        exporter_of(filled(megatron_model(), tmp_path)),
        {"rope_theta": 10000, "dtype": "bfloat16"},
    )
    quantised = config | {"quantization_config": {"quant_method": "fp8"}}
    export_folder(exporter, tmp_path / "out", template=tmp_path, config=quantised)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == {"rope_theta": 10000, "dtype": "float32"}


def test_a_version_is_written_again_while_an_engine_holds_files_of_it(tmp_path, monkeypatch):
    """As on NFS, where the folder of a held file cannot be removed."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, ignore_errors=False: None)
        for text in ("first", "second", "third"):
            temporary = weight_files.temporary_of(tmp_path / "version-1")
            temporary.mkdir()
            (temporary / "weights").write_text(text)
            assert weight_files.commit(temporary, tmp_path / "version-1") == len(text)
            assert (tmp_path / "version-1/weights").read_text() == text
    assert len(list(tmp_path.glob(".version-*"))) == 2, "names that the update's removal finds"


FP8_AND_SCALES = 1 + 4 / 128**2
"""Bytes of an element and its part of a scale; shards that end within a block have a few more."""
CASES = (
    Case("tp2 ep2", tensor=2, expert=2),
    Case("pp2", pipeline=2),
    Case("one wants it", tensor=2, expert=2, only_first=True),
)
ALIGNED = ("linear_qkv", "linear_proj")
ACROSS_BLOCKS = ("0.mlp.linear_fc1", "0.mlp.linear_fc2")


@pytest.fixture(scope="module")
def wanted():
    """Each full tensor as the engine gets it."""
    blocks, made = quantisation(), {}
    for name, tensor in hugging_face().items():
        for key, value in blocks.tensors(name, tensor).items():
            made[key] = (str(value.dtype), value.contiguous().view(torch.uint8).numpy())
    return made


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """Of each case what came and the bytes given to collectives, for each rank. Processes that are
    started once.
    """
    folder = tmp_path_factory.mktemp("exports")
    save_file(hugging_face(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')
    context = multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    ranks = [
        context.Process(
            target=quantised_ranks.run, args=(rank, port, CASES, folder, results), daemon=True
        )
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted((results.get() for _ in range(WORLD * len(CASES))), key=lambda one: one[:2])
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    return {
        case.name: [(tensors, given) for name, _, tensors, given in found if name == case.name]
        for case in CASES
    }


def elements(*parts):
    return sum(
        full(name).numel() for name in quantised_ranks.SHAPES if any(part in name for part in parts)
    )


def assert_bit_equal(ranks, wanted):
    for tensors, _ in ranks:
        assert tensors.keys() == wanted.keys()
        for name, (dtype, data) in wanted.items():
            assert tensors[name][0] == dtype, name
            assert np.array_equal(tensors[name][1], data), name


def test_tensor_and_expert_parallel_ranks_gather_fp8_where_a_shard_is_whole_blocks(
    gathered, wanted
):
    ranks = gathered["tp2 ep2"]
    assert_bit_equal(ranks, wanted)
    of_a_rank = elements("experts", *ALIGNED) / WORLD * FP8_AND_SCALES
    in_full = (elements(*ACROSS_BLOCKS) + elements("word_embeddings", "output_layer")) / WORLD * 2
    for _, given in ranks:
        assert given["all_gather"] == pytest.approx(of_a_rank + in_full, rel=0.001)


def test_stages_receive_fp8_from_the_stage_that_holds_the_weights(gathered, wanted):
    ranks = gathered["pp2"]
    assert_bit_equal(ranks, wanted)
    quantised = elements("experts", *ALIGNED, *ACROSS_BLOCKS) * FP8_AND_SCALES
    in_full = elements("word_embeddings", "output_layer", "router", "layernorm") * 2
    for _, given in ranks:
        assert given["broadcast"] == pytest.approx(quantised + in_full, rel=0.001)


def test_a_rank_without_a_result_quantises_only_what_it_sends(gathered, wanted):
    """Of what is quantised after the gather, and where its shard is no whole blocks, nothing."""
    first, second = gathered["one wants it"]
    assert_bit_equal([first], wanted)
    assert second[0] == {}
    assert first[1]["all_gather"] == second[1]["all_gather"]
    own = elements("experts", *ALIGNED) // WORLD
    assert second[1]["quantised"] == own
    assert first[1]["quantised"] == own + elements(*ACROSS_BLOCKS)


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_ranks_of_a_stage_divide_the_files_of_an_export(gathered, case):
    """Together the files are those that one rank would write, byte for byte."""
    ranks = [given for _, given in gathered[case]]
    wrote = [given["wrote"] for given in ranks]
    assert all(wrote) and not {*wrote[0]} & {*wrote[1]}
    folder = Path(ranks[0]["folder"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert sorted([*wrote[0], *wrote[1]]) == files
    expected = hugging_face()
    assert index["weight_map"].keys() == expected.keys()
    for file, names in zip(files, ranks[0]["plan"], strict=True):
        written = (folder / file).read_bytes()
        assert written == save({name: expected[name] for name in names}, {"format": "pt"})
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in expected.values())
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Tiny"]
    for rank, given in enumerate(ranks):
        own = [name for name, file in index["weight_map"].items() if file in wrote[rank]]
        assert given["received for files"] == lacking(own, rank, case)


def lacking(names, rank, case):
    """Bytes of tensors that a rank does not hold."""
    expected, total = hugging_face(), 0
    for name in names:
        if case == "pp2" or name.endswith(("norm.weight", "mlp.gate.weight")):
            continue
        expert = re.search(r"experts\.(\d)", name)
        held = 1 / WORLD if expert is None else int(expert[1]) // 2 == rank
        total += round(expected[name].nbytes * (1 - held))
    return total


def test_ranks_divide_the_tensors_of_a_hash_that_is_the_same_at_every_layout(gathered):
    """One digest a tensor, of its name, type, shape and bytes; the hash is that of all digests."""
    whole = hash_of(hugging_face())
    for case, ranks in gathered.items():
        hashed = [given["hashed"] for _, given in ranks]
        assert sorted([*hashed[0], *hashed[1]]) == sorted(hugging_face())
        for rank, (_, given) in enumerate(ranks):
            assert given["hash"] == whole
            assert given["received for the hash"] == lacking(hashed[rank], rank, case)
            experts = [name for name in hashed[rank] if ".experts." in name]
            assert hashed[rank] and not lacking(experts, rank, case)


def test_a_folder_with_the_names_of_modules_is_refused_with_the_remedy(tmp_path):
    """LlamaFactory#8338: transformers saves such a folder again with the same names."""
    tensors = {"model.language_model.embed_tokens.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        WeightError, match=r"rename model.language_model. to model. and model.visual"
    ):
        HuggingFaceFolder(tmp_path).read("model.embed_tokens.weight")
