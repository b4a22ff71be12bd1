"""`slipstream list`, `rm` and `pull` on a cache of the hub, without a network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.model_folders import ModelShape, save_folder
from common.gguf.folder import folder_of
from common.tokenizer_file import needed_tokenizer_file
from services.commands.models import age_text, size_text
from tests.gguf_files import GgufOptions, write_gguf
from tests.patience import PATIENCE_S
from tests.ranked_folder import write_ranked
from tests.system.terminal import ROOT, Terminal

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with two models that can be served and three that cannot."""
    add_model(
        tmp_path,
        "org/small",
        {
            "config.json": json.dumps(CONFIG),
            "tokenizer.json": "{}",
            "a.safetensors": "x" * 5000,
        },
    )
    bloom = json.dumps(CONFIG | {"architectures": ["BloomForCausalLM"]})
    add_model(tmp_path, "org/bloom", {"config.json": bloom, "a.safetensors": ""})
    hqq = json.dumps(CONFIG | {"quantization_config": {"quant_method": "hqq"}})
    add_model(tmp_path, "org/hqq", {"config.json": hqq, "a.safetensors": ""})
    gptq = json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    add_model(tmp_path, "org/gptq", {"config.json": gptq, "a.safetensors": ""})
    add_model(tmp_path, "org/llama-gguf", {"model.gguf": "GGUF\3\0\0\0" + 16 * "\0"})
    return tmp_path


def add_model(home: Path, name: str, files: Mapping[str, str | Path]) -> Path:
    """Lay files out as the hub's client does: blobs, and links to them from a snapshot, which is
    returned."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = hashlib.sha1(name.encode()).hexdigest()
    for part in ("blobs", f"snapshots/{commit}", "refs"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    for number, (file, content) in enumerate(files.items()):
        data = content.encode() if isinstance(content, str) else content.read_bytes()
        (repository / "blobs" / str(number)).write_bytes(data)
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    return snapshot


def run(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *words],
        cwd=ROOT,
        env={
            "HF_HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
            **more,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_the_list_says_what_is_there_and_what_can_be_served(cache: Path) -> None:
    ran = run(cache, "list")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "MODEL               SIZE  USED          SERVED",
        "org/bloom          152 B  today         no: BloomForCausalLM",
        "org/gptq           212 B  today         yes",
        "org/hqq            200 B  today         no: quantized by hqq",
        "org/llama-gguf      24 B  today         no: GGUF",
        "  not model.gguf: architecture without a name is not supported in GGUF files",
        "org/small         5.2 kB  today         yes",
        "",
        "5.7 kB in all",
    ]


def test_the_list_is_there_for_programs(cache: Path) -> None:
    models = {model["id"]: model for model in json.loads(run(cache, "list", "--json").stdout)}
    assert models["org/small"]["served"]
    assert models["org/llama-gguf"]["why_not"] == "GGUF"
    assert Path(models["org/small"]["path"]).is_dir()


def test_gguf_files_are_listed_with_the_command_that_serves_each(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "tiny", ModelShape(num_layers=1))
    shards = GgufOptions(shard_tensors=10)
    whole = write_gguf(folder, tmp_path / "tiny Q8_0.gguf", GgufOptions("Q8_0"))
    first = write_gguf(folder, tmp_path / "tiny-F32.gguf", shards)
    parts = {part.name: part for part in first.parent.glob("tiny-F32-*.gguf")}
    assert len(parts) > 1
    snapshot = add_model(
        tmp_path,
        "org/tiny-gguf",
        {"config.json": "{}", "mmproj.gguf": "GGUF", whole.name: whole} | parts,
    )
    ran = run(tmp_path, "list")
    assert "  yes, by file:\n" in ran.stdout
    assert f"\n  slipstream serve '{snapshot}/tiny Q8_0.gguf'\n" in ran.stdout
    assert f"\n  slipstream serve {snapshot}/{first.name}\n" in ran.stdout
    assert "\n  not mmproj.gguf: is not a whole GGUF file" in ran.stdout
    assert ran.stdout.count(".gguf") == 3
    (row,) = json.loads(run(tmp_path, "list", "--json").stdout)
    assert row["served"] and not row["why_not"]
    served = {Path(each["path"]).name for each in row["gguf_files"] if each["served"]}
    assert served == {whole.name, first.name}


def test_the_list_says_where_the_files_made_of_gguf_and_tiktoken_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "tiny", ModelShape(num_layers=1))
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    made = folder_of(file, cache)
    size = sum(each.stat().st_size for each in made.iterdir() if not each.is_symlink())
    expected = (
        f"What was read of a GGUF file takes {size_text(size)} in {tmp_path}/slipstream/gguf."
    )
    assert run(tmp_path, "list", **cache).stdout.splitlines()[-1] == expected
    ranked = {name: write_ranked(tmp_path / name) for name in ("first", "second")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    size = sum(needed_tokenizer_file(each).stat().st_size for each in ranked.values())
    assert run(tmp_path, "list", **cache).stdout.splitlines()[-2:] == [
        expected,
        f"What was read of 2 tiktoken files takes {size_text(size)} in "
        f"{tmp_path}/slipstream/tokenizers.",
    ]


def test_an_empty_list_says_how_to_fill_it(tmp_path: Path) -> None:
    ran = run(tmp_path, "list")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "No model is downloaded. `slipstream pull" in ran.stdout


def test_a_model_is_removed_and_the_others_stay(cache: Path) -> None:
    ran = run(cache, "rm", "--yes", "org/small")
    assert (ran.returncode, ran.stdout) == (0, "Removed; 5.2 kB are free again.\n")
    assert not (cache / "hub" / "models--org--small").exists()
    assert "org/bloom" in run(cache, "list").stdout


def test_on_a_terminal_it_is_asked_first(cache: Path) -> None:
    with Terminal("rm", "org/small", env={"HF_HOME": str(cache)}) as terminal:
        terminal.expect("Remove org/small (5.2 kB)? [y/N]")
        terminal.type("\n")
        terminal.expect("Nothing was removed.")
        assert terminal.wait() == 1
    assert "org/small" in run(cache, "list").stdout
    with Terminal("rm", "org/small", env={"HF_HOME": str(cache)}) as terminal:
        terminal.expect("[y/N]")
        terminal.type("y\n")
        assert terminal.wait() == 0
    assert "org/small" not in run(cache, "list").stdout


def test_nothing_is_removed_where_nobody_can_be_asked(cache: Path) -> None:
    ran = run(cache, "rm", "org/small")
    assert (ran.returncode, ran.stderr) == (
        2,
        "slipstream rm: no terminal to confirm on; give --yes\n",
    )


def test_a_model_that_is_not_there_gets_a_suggestion(cache: Path) -> None:
    ran = run(cache, "rm", "org/smal")
    assert ran.returncode == 1
    assert ran.stderr == ("slipstream rm: org/smal is not downloaded; did you mean org/small?\n")


def test_a_model_that_is_here_is_pulled_without_a_network(cache: Path) -> None:
    ran = run(cache, "pull", "org/small")
    assert ran.returncode == 0, ran.stderr
    assert (Path(ran.stdout.strip()) / "config.json").is_file()


def test_a_model_that_cannot_be_served_is_not_pulled(cache: Path) -> None:
    ran = run(cache, "pull", "org/bloom")
    assert ran.returncode == 1
    assert "architecture BloomForCausalLM is not supported" in ran.stderr
    assert run(cache, "pull", "--force", "org/bloom").returncode == 0


def test_a_model_without_a_tokenizer_is_not_pulled(tmp_path: Path) -> None:
    add_model(tmp_path, "org/mute", {"config.json": json.dumps(CONFIG), "a.safetensors": ""})
    ran = run(tmp_path, "pull", "org/mute")
    assert ran.returncode == 1
    assert "tokenizer.json is missing" in ran.stderr
    assert run(tmp_path, "pull", "--force", "org/mute").returncode == 0


@pytest.mark.parametrize(
    ("model", "said"),
    [("org/absent", "could not be fetched from the hub"), ("../x", "is no id of a model")],
)
def test_a_pull_that_fails_says_why_in_a_line(model: str, said: str, tmp_path: Path) -> None:
    ran = run(tmp_path, "pull", model)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith("slipstream pull: ")
    assert said in line


def test_sizes_and_ages_are_short() -> None:
    sizes = [size_text(size) for size in (0, 999, 1000, 12_345_678, 1_500_000_000_000)]
    assert sizes == ["0 B", "999 B", "1.0 kB", "12.3 MB", "1.5 TB"]
    assert age_text(0.0) == "unknown"
