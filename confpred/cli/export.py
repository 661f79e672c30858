"""`confpred export`: a Triton kernel's choices as the JSON files that serving engines read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import click

from confpred.cli.arguments import FOLDER, OUTPUT, check_files, device_option, force_option
from confpred.errors import InvalidInput
from confpred.files import write_whole

#: Batch sizes of the files that vLLM and SGLang ship; between them the nearest one counts.
BATCHES = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
FIELDS = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages",
)  # fmt: skip


@click.command("export")
@click.argument("engine", type=click.Choice(["vllm", "sglang"]))
@click.option("--kernel", required=True, help="Name of the engine's kernel under confpred.tuned.")
@click.option("--model", required=True, type=FOLDER, help="Model of the kernel.")
@click.option("--layer", required=True, metavar="WORDS", help="Its call but for the batch size.")
@click.option("--batch", default="M", show_default=True, help="Name of the batch size in the key.")
@click.option("--sizes", required=True, help="Sizes in the file's name, as E=8,N=7168 or N=..,K=..")
@click.option("--dtype", help="Quantization in the file's name, such as fp8_w8a8.")
@click.option("--block-shape", help="Block of a scale in the file's name, such as 128,128.")
@click.option("--out", required=True, type=OUTPUT, help="Folder of the files.")
@device_option
@force_option
def export(
    engine: str,
    kernel: str,
    model: Path,
    layer: str,
    batch: str,
    sizes: str,
    dtype: str | None,
    block_shape: str | None,
    out: Path,
    device: str,
    force: bool,
) -> None:
    """Write a tuned file of fused experts (E and N) or of block-scaled products (N and K) for
    vLLM or SGLang, for all their batch sizes, from a model of the engine's own kernel.

    N of experts is the intermediate size of a shard, after the activation. vLLM reads the folder
    $VLLM_TUNED_CONFIG_FOLDER, SGLang the folder $SGLANG_MOE_CONFIG_DIR.

    \b
    export CONFPRED_FAMILIES=my_experts
    confpred export vllm --kernel fused_moe_kernel --model models --device h100 \\
      --layer "E=8 N=14336 K=4096 top_k=2 dtype=bfloat16" --sizes E=8,N=7168 --out tuned
    """
    from confpred.families.registry import all_families
    from confpred.predict.predictor import Predictor
    from confpred.problem.device import get_device
    from confpred.triton.triton_family import TritonFamily

    family = all_families().get(kernel)
    if not isinstance(family, TritonFamily):
        raise InvalidInput("kernel", kernel, "a Triton kernel of a module in CONFPRED_FAMILIES")
    board = get_device(device)
    name = file_name(sizes, board.product, dtype, block_shape)
    version = f"triton_{family.version.replace('.', '_')}"
    path = out / ("" if engine == "vllm" else f"configs/{version}") / name
    check_files({"out": path}, force=force)
    predictor, configs = Predictor.load(model), dict[str, Mapping[str, object]]()
    for size in BATCHES:
        call = family.operation.problem.parse(f"{layer} {batch}={size}")
        choice = predictor.choose(call, board)
        if choice.family != family.name or choice.source == "heuristic":
            raise InvalidInput("model", str(model), f"a model that knows {call}")
        config = family.kwargs[choice.candidate.config_id]
        if missing := [field for field in FIELDS if field not in config]:
            raise InvalidInput("kernel", kernel, f"a kernel whose configs have {missing[0]}")
        configs[str(size)] = {field: config[field] for field in FIELDS}
    text = json.dumps(configs, indent=4) + "\n"
    write_whole(path, lambda file: file.write(text.encode()), replace=force)
    click.echo(f"{path}: {len(configs)} batch sizes")


def file_name(sizes: str, product: str, dtype: str | None, block_shape: str | None) -> str:
    """Return the name that both engines look for.

    Raises:
        InvalidInput: the sizes or the block are not written as the engines write them.
    """
    if not re.fullmatch("(E=[0-9]+,N=[0-9]+)|(N=[0-9]+,K=[0-9]+)", sizes):
        raise InvalidInput("sizes", sizes, "E=8,N=7168 of experts, or N=7168,K=4096 of a product")
    if block_shape is not None and not re.fullmatch("[0-9]+,[0-9]+", block_shape):
        raise InvalidInput("block-shape", block_shape, "two integers, such as 128,128")
    words = [sizes, "device_name=" + re.sub(r"[\s/]+", "_", product)]
    words += [f"dtype={dtype}"] if dtype else []
    words += [f"block_shape=[{block_shape}]"] if block_shape else []
    return ",".join(words) + ".json"
