"""A published folder is used as its card says, with hf_specdec and where it isn't installed."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.modeling.mimo import mimo_from_llama
from hf_specdec.publishing.folder import PublishOptions, publish_folder

SCRIPT = Path(__file__).with_name("fresh_environment.py")


@pytest.fixture
def published(target, make_speculator, tokenizer, tmp_path: Path) -> Path:
    """The folders drafter and mtp, published, and target."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_speculator(share_target_weights=True, draft_vocab_size=48).save_pretrained(
        tmp_path / "drafter"
    )
    mimo_from_llama(target).save_pretrained(tmp_path / "mtp")
    for name in ("drafter", "mtp"):
        options = PublishOptions(
            repo_id=f"me/tiny-{name}",
            base_model="owner/tiny-target",
            target=str(tmp_path / "target"),
        )
        publish_folder(tmp_path / name, options)
    return tmp_path


def packages_without_hf_specdec(folder: Path) -> Path:
    """Links to all that is installed but hf_specdec, however that was installed.

    Files that tell Python of an editable install are read in ``site-packages`` alone.
    """
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # Where a test environment was put on top of another.
    places |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    packages = folder / "packages"
    packages.mkdir()
    for place in places:
        for entry in Path(place).iterdir():
            link = packages / entry.name
            if not entry.name.startswith(("hf_specdec", "__editable__")) and not link.exists():
                link.symlink_to(entry, target_is_directory=entry.is_dir())
    return packages


def run(published: Path, which: str, python_path: Path, *flags: str) -> None:
    # Nothing of this environment that could lead to hf_specdec.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HF_"))}
    environment |= {
        "PYTHONPATH": str(python_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HF_HOME": str(published / "home"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *flags, str(SCRIPT), str(published), which],
        cwd=published, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the cards say" in done.stdout


def test_with_hf_specdec(published: Path) -> None:
    run(published, "with", Path(hf_specdec.__file__).parents[1])


def test_without_hf_specdec(published: Path) -> None:
    # -S: site-packages itself is not looked at.
    run(published, "without", packages_without_hf_specdec(published), "-S")
