"""What a guard asks of its host: private folders, whole bundles, own addresses."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest

from hetrun.transport import guard_host
from hetrun.transport.guard_host import (
    HostFaultError,
    bundle_path,
    data_address,
    free_port,
    has_bundle,
    keep_bundle,
    need_readable,
    new_job_folder,
    open_base,
)


def test_the_base_is_private_below_work_dir(tmp_path: Path) -> None:
    base = open_base(str(tmp_path), {})
    assert base == tmp_path / f"hetrun-{os.getuid()}"
    assert base.stat().st_mode & 0o777 == 0o700


def test_the_cache_is_used_before_the_temporary_folder(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "x"), "HOME": str(tmp_path), "TMPDIR": "/nowhere"}
    assert open_base(None, environ) == tmp_path / "x/hetrun"
    del environ["XDG_CACHE_HOME"]
    assert open_base(None, environ) == tmp_path / ".cache/hetrun"


def test_without_a_cache_the_temporary_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    assert open_base(None, environ) == tmp_path / f"hetrun-{os.getuid()}"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    own = tmp_path / f"hetrun-{os.getuid()}"
    own.mkdir()
    own.chmod(0o770)
    with pytest.raises(HostFaultError, match="not a private folder"):
        open_base(str(tmp_path), {})


def test_a_link_in_the_place_of_our_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"hetrun-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostFaultError, match="not a private folder"):
        open_base(str(tmp_path), {})


def test_a_parent_where_everybody_may_swap_our_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(HostFaultError, match="everybody may write"):
        open_base(str(tmp_path), {})
    tmp_path.chmod(0o1777)
    assert open_base(str(tmp_path), {}).is_dir()


def test_a_bundle_that_was_changed_is_not_used(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"code").hexdigest()
    assert not has_bundle(tmp_path, sha256)
    keep_bundle(tmp_path, sha256, b"code")
    assert has_bundle(tmp_path, sha256)
    bundle_path(tmp_path, sha256).write_bytes(b"evil")
    assert not has_bundle(tmp_path, sha256)
    with pytest.raises(HostFaultError, match="does not read back"):
        keep_bundle(tmp_path, sha256, b"evil")


def test_env_files_of_dead_jobs_are_removed_and_living_jobs_left_alone(tmp_path: Path) -> None:
    dead, lock = new_job_folder(tmp_path, "run")
    living, living_lock = new_job_folder(tmp_path, "run")
    for folder in (dead, living):
        (folder / "env").mkdir()
    os.close(lock)
    other, other_lock = new_job_folder(tmp_path, "run")
    assert (dead.is_dir(), (dead / "env").exists(), (living / "env").exists()) == (
        *(True, False),
        True,
    )
    assert other.stat().st_mode & 0o777 == 0o700
    os.close(living_lock)
    os.close(other_lock)


def test_old_job_folders_go_the_newest_stay(tmp_path: Path) -> None:
    made = []
    for number in range(13):
        folder, lock = new_job_folder(tmp_path, f"run{number}")
        os.utime(folder, (number, number))
        os.close(lock)
        made.append(folder)
    assert [folder.exists() for folder in made] == [False] * 2 + [True] * 11


HERE = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("ens3", "10.0.0.1"), ("ens3", "fd00::1")]


@pytest.fixture(autouse=True)
def _fixed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_host, "addresses", lambda: HERE)


def test_the_interface_is_the_one_that_holds_the_address() -> None:
    assert data_address("10.0.0.1", None, None) == ("10.0.0.1", "ens3")
    assert data_address("fd00::1", None, None) == ("fd00::1", "ens3")


def test_an_interface_alone_gives_its_first_address() -> None:
    assert data_address(None, "docker0", None) == ("172.17.0.1", "docker0")


def test_an_address_of_another_host_is_refused_with_those_that_are_here() -> None:
    with pytest.raises(HostFaultError, match=r"10\.0\.0\.9 is not .*10\.0\.0\.1 on ens3"):
        data_address("10.0.0.9", None, None)
    with pytest.raises(HostFaultError, match="not an address of this host on docker0"):
        data_address("10.0.0.1", "docker0", None)


def test_a_name_that_means_something_else_on_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer)
    with pytest.raises(HostFaultError, match=r"a1 is 10\.0\.0\.1 .* but 127\.0\.1\.1 on this host"):
        data_address("10.0.0.1", None, "a1")


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as other:
            free = other.getsockname()[1]
        assert free_port("127.0.0.1", [port, free]) == free
        with pytest.raises(HostFaultError, match="all taken"):
            free_port("127.0.0.1", [port])


def test_real_addresses_include_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ("lo", "127.0.0.1") in guard_host.addresses()


def test_what_the_job_will_read_is_opened_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words")
    need_readable(str(tmp_path / "text"))
    with pytest.raises(HostFaultError, match=r"cannot read .*/none: No such file"):
        need_readable(str(tmp_path / "none"))
    need_readable(str(tmp_path))  # a folder of texts, or of weights
    with pytest.raises(HostFaultError, match="Not a directory"):
        need_readable(str(tmp_path / "text" / "inner"))
