# SPDX-License-Identifier: Apache-2.0
"""Files that an engine loads are those that were opened then, whatever their names lead to later."""

import os
from pathlib import Path

import numpy as np
import pytest
from kv.test_weights import print_of, save, tensors

from pd_connector.kv.checkpoint_files import CheckpointFiles


def opened(path: Path) -> CheckpointFiles:
    found = CheckpointFiles.open(path)
    assert found is not None
    return found


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A name that leads to the first of two checkpoints, as deployments have it."""
    save(tmp_path / "one", tensors())
    save(tmp_path / "other", {**tensors(), "embed": np.zeros((1000, 64), np.float32)})
    (tmp_path / "current").symlink_to("one")
    return tmp_path / "current"


def switch(link: Path) -> None:
    (link.parent / "next").symlink_to("other")
    (link.parent / "next").rename(link)


def test_a_link_that_is_switched_after_the_load_leads_to_what_was_loaded(link: Path) -> None:
    files = opened(link)
    files.loaded()
    switch(link)
    assert print_of([files]) == print_of([opened(link.parent / "one")])
    assert files.problem == ""
    assert print_of([opened(link)]) != print_of([files])


def test_a_link_that_is_switched_during_the_load_leaves_the_weights_unknown(link: Path) -> None:
    files = opened(link)
    switch(link)
    files.loaded()
    assert "model.safetensors was replaced" in files.problem


@pytest.mark.parametrize("how", ["another link", "the same link"])
def test_a_link_that_is_switched_and_switched_back_during_the_load_leaves_the_weights_unknown(
    link: Path, how: str
) -> None:
    """The engine opens files by name after they were opened here, so it may have read the other checkpoint."""
    files = opened(link)
    if how == "the same link":  # moved away and back
        link.rename(link.parent / "kept")
        link.symlink_to("other")
        (link.parent / "kept").rename(link)
    else:
        switch(link)
        (link.parent / "next").symlink_to("one")
        (link.parent / "next").rename(link)
    assert link.resolve().name == "one"
    files.loaded()
    assert "model.safetensors was replaced" in files.problem


def test_links_to_links_and_folders_above_them_are_looked_at(link: Path) -> None:
    """As in Hugging Face's cache: a file is a link into another folder."""
    blobs = link.parent / "blobs"
    blobs.mkdir()
    (link / "model.safetensors").rename(blobs / "one")
    (link / "model.safetensors").symlink_to("../blobs/one")
    (link.parent / "named").symlink_to(link.absolute())
    files, second = opened(link.parent / "named"), opened(link.parent / "named")
    files.loaded()
    assert files.problem == ""
    switch(link)
    (link.parent / "next").symlink_to("one")
    (link.parent / "next").rename(link)
    second.loaded()
    assert "model.safetensors was replaced" in second.problem


def test_a_link_to_itself_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(OSError, match="symbolic links"):
        CheckpointFiles.open(tmp_path)


def test_a_checkpoint_that_is_moved_away_after_the_load_is_still_read(link: Path) -> None:
    files = opened(link)
    files.loaded()
    before = print_of([opened(link)])
    (link.parent / "one" / "model.safetensors").unlink()
    assert print_of([files]) == before


def test_a_file_that_is_written_to_is_not_what_was_loaded(link: Path) -> None:
    file = link / "model.safetensors"
    files, before = opened(link), file.stat()
    files.loaded()
    with file.open("r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(bytes(8))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    files.look()
    assert "model.safetensors was written to" in files.problem, "although its time was set back"


def test_what_is_opened_is_closed_where_a_file_cannot_be(link: Path) -> None:
    (link / "broken.safetensors").symlink_to("nowhere")
    with pytest.raises(OSError, match=r"broken\.safetensors"):
        CheckpointFiles.open(link)
