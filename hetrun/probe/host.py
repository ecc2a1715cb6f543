"""All sections of one host -> HostFacts. Pure: what was asked, and when it was received, comes in."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetrun.model import GIB, MIB, Connection, Device, HostFacts, HostSpec, Nic
from hetrun.probe.answer import Answer, Section, last_line, plain, read_answer
from hetrun.probe.devices import Found, accelerators, cpu_devices, emulated_devices
from hetrun.probe.links import (
    find_device_links,
    find_device_ports,
    find_matrices,
    find_peer_memory,
    find_rdma,
    find_told_nics,
    port_warnings,
    rdma_warnings,
)
from hetrun.probe.nics import find_nics
from hetrun.probe.places import find_nic_links, port_places
from hetrun.probe.script import CPU, PYTHON_TIMEOUT_S, tool_sections
from hetrun.probe.system import (
    become_warnings,
    find_limits,
    find_names,
    limit_warnings,
    name_warnings,
)
from hetrun.vendors import Vendor, all_vendors, read_tool

MIN_DISK_BYTES = 1 * GIB
DOCKER_SHM_BYTES = 64 * MIB  # what a container gets unless it is told otherwise
MAX_CLOCK_OFFSET_S = 5.0
MIN_PYTHON = (3, 10)
MAX_WARNINGS = 64
MAX_PLUGINS = 32
_TIMED_OUT = 124
_NO_COMMAND = (126, 127)


def parse_host(
    spec: HostSpec,
    output: bytes,
    *,
    nonce: str,
    received_s: float | None = None,
    vendors: Mapping[str, Vendor] | None = None,
) -> HostFacts:
    """Return the facts of one host from what its script printed; never raises, whatever the bytes.

    `received_s` is the controller's clock when the answer was complete. The host reads its own clock as the
    last thing it does, so the two differ by the clocks' offset and the way back, and by nothing else.
    """
    vendors = all_vendors() if vendors is None else vendors
    answer = read_answer(output, nonce=nonce)
    if answer.no_space:
        error = "no folder on the host can be written to (tried /dev/shm, /tmp, /var/tmp and home)"
        return HostFacts(spec=spec, error=error)
    if not answer.is_complete:
        said = last_line(output)
        error = "the answer stops in the middle" + (f"; last line: {said}" if said else "")
        return HostFacts(spec=spec, error=error)
    cpu_model, cores = _processor(spec, answer, vendors)
    memory_bytes = _memory_bytes(answer.section("memory"))
    disk_free_bytes = _df(answer.section("disk"), column=3)
    shm_bytes = _df(answer.section("shm"), column=1)
    offset_s = None
    if answer.end_s is not None and received_s is not None:
        offset_s = answer.end_s - received_s
    nics, rdma = find_nics(answer), find_rdma(answer)
    max_open_files, max_locked_bytes = find_limits(answer)
    hostname, names = find_names(answer)
    found = _devices(spec, answer, vendors, cpu_model=cpu_model, memory_bytes=memory_bytes)
    matrices = find_matrices(spec, answer, vendors, found.devices)
    places = port_places(rdma, nics)
    told_nics = find_told_nics(matrices, places)
    ports = find_device_ports(spec, answer, vendors, found.devices)
    python = _python(answer.section("python"))
    warnings = [
        *found.warnings,
        *_python_warnings(spec, python, found, vendors),
        *_nic_warnings(spec, nics),
        *rdma_warnings(rdma, max_locked_bytes),
        *port_warnings(ports),
        *name_warnings(spec, names),
        *limit_warnings(max_open_files),
        *become_warnings(spec, answer),
        *_room_warnings(spec, disk_free_bytes, shm_bytes),
        *_clock_warnings(offset_s),
    ]
    return HostFacts(
        spec=spec,
        kernel=plain(answer.section("kernel").stdout),
        cpu_model=cpu_model,
        num_cores=cores,
        memory_bytes=memory_bytes,
        disk_free_bytes=disk_free_bytes,
        shm_bytes=shm_bytes,
        clock_offset_s=offset_s,
        python_path=python.get("path"),
        python_version=python.get("version"),
        torch_version=python.get("torch"),
        torch_error=python.get("torch_error"),
        plugins=tuple(sorted((python["plugins"] or set()) - python["plugin_errors"].keys())),
        plugin_errors=python["plugin_errors"],
        hostname=hostname,
        names=names,
        max_open_files=max_open_files,
        max_locked_bytes=max_locked_bytes,
        rdma=rdma,
        peer_memory=find_peer_memory(answer),
        device_links=find_device_links(matrices),
        nic_links=find_nic_links(answer, found.devices, told_nics, ports=places),
        device_ports=ports,
        nics=nics,
        devices=_with_threads(found.devices, cores),
        warnings=tuple(warnings[:MAX_WARNINGS]),
    )


# --- devices ----------------------------------------------------------------------------------------------


def _devices(
    spec: HostSpec,
    answer: Answer,
    vendors: Mapping[str, Vendor],
    *,
    cpu_model: str | None,
    memory_bytes: int | None,
) -> Found:
    """Return emulated chips where the host plays some, else accelerators, else the processor."""
    if spec.emulate:
        return Found(devices=emulated_devices(spec))
    found = accelerators(spec, answer, vendors, memory_bytes=memory_bytes)
    if found.is_bare:
        return Found(devices=cpu_devices(spec, model=cpu_model, memory_bytes=memory_bytes))
    if not found.devices:
        what = "there are accelerators but none can be used, so this host offers no device"
        return Found(warnings=(*found.warnings, what))
    return found


def _with_threads(devices: tuple[Device, ...], num_cores: int | None) -> tuple[Device, ...]:
    """Share the cores out to real devices; emulated ones keep one thread, their time is modelled."""
    share = max(1, (num_cores or 1) // max(1, len(devices)))
    return tuple(
        device if device.emulated else replace(device, num_threads=share) for device in devices
    )


# --- processor, memory, room ------------------------------------------------------------------------------


def _processor(
    spec: HostSpec, answer: Answer, vendors: Mapping[str, Vendor]
) -> tuple[str | None, int | None]:
    """Return the processor's name and how many cores this user may use."""
    cores = _number(answer.section("cores").text.strip())
    model = None
    for tool in tool_sections(spec, {CPU: vendors[CPU]} if CPU in vendors else {}):
        section = answer.section(tool.section)
        read = read_tool(
            CPU,
            tool.command.command,
            stdout=section.stdout,
            stderr=section.stderr,
            rc=section.rc,
        )
        if read.cpu is not None:
            model = model or read.cpu.model
            cores = cores or read.cpu.logical
    if model is None:
        model = answer.section("cpuinfo").text.partition(":")[2]
    return plain(model, max_chars=64), cores or None


def _memory_bytes(section: Section) -> int | None:
    """Return the host's memory, or its container's limit if that is lower."""
    sizes: list[int] = []
    for line in section.lines:
        words = line.split()
        if len(words) == 3 and words[0] == "MemTotal:" and (size := _number(words[1])):
            sizes.append(size << 10)
        elif len(words) == 1 and (size := _number(words[0])):
            sizes.append(size)
    return min(sizes, default=None)


def _df(section: Section, *, column: int) -> int | None:
    """Return a column of `df -kP` in bytes; the first column may hold spaces."""
    lines = section.lines
    words = lines[-1].rsplit(maxsplit=5) if len(lines) >= 2 else []
    number = _number(words[column]) if len(words) == 6 else None
    return None if number is None else number << 10


def _number(word: str) -> int | None:
    return int(word) if re.fullmatch(r"[0-9]{1,19}", word) else None


def _room_warnings(spec: HostSpec, disk: int | None, shm: int | None) -> list[str]:
    warnings = []
    if disk is not None and disk < MIN_DISK_BYTES:
        where = spec.work_dir or "the cache folder"
        warnings.append(f"{disk // MIB} MiB free for {where}, need {MIN_DISK_BYTES // MIB} MiB")
    if shm is not None and shm <= DOCKER_SHM_BYTES and not spec.emulate:
        what = f"/dev/shm has {shm // MIB} MiB, too little for most collective libraries"
        warnings.append(f"{what}; start the container with --ipc=host or --shm-size")
    return warnings


def _clock_warnings(offset_s: float | None) -> list[str]:
    if offset_s is None or abs(offset_s) <= MAX_CLOCK_OFFSET_S:
        return []
    way = "ahead of" if offset_s > 0 else "behind"
    return [f"clock is {abs(offset_s):.0f} s {way} this machine's; times in logs will not line up"]


# --- python -----------------------------------------------------------------------------------------------


def _python(section: Section) -> dict[str, Any]:
    """Return path, version, torch or torch_error (text), plugins (None where nobody asked) and their errors."""
    found: dict[str, Any] = {"plugins": None, "plugin_errors": {}}
    for line in reversed(section.lines):
        try:
            said = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and "version" in said:
            for key in ("path", "version", "torch", "torch_error"):
                if isinstance(said.get(key), str):
                    found[key] = plain(said[key])
            if isinstance(said.get("plugins"), list):
                found["plugins"] = {str(name) for name in said["plugins"]}
            if isinstance(said.get("plugin_errors"), dict):
                found["plugin_errors"] = {
                    str(name): plain(str(why)) or "no word"
                    for name, why in list(said["plugin_errors"].items())[:MAX_PLUGINS]
                }
            return found
    if section.rc == _TIMED_OUT:
        found["torch_error"] = f"no answer within {PYTHON_TIMEOUT_S} s"
    elif section.rc in _NO_COMMAND:
        found["torch_error"] = last_line(section.stderr) or "no such interpreter"
    else:
        said_last = last_line(section.stderr) or last_line(section.stdout) or "no word"
        found["torch_error"] = f"ended with {section.rc}: {said_last}"
    return found


def _python_warnings(
    spec: HostSpec, python: Mapping[str, Any], found: Found, vendors: Mapping[str, Vendor]
) -> list[str]:
    """Say what keeps this host from running a rank."""
    version = python.get("version")
    if version is None:
        return [f"{spec.python} cannot be run: {python.get('torch_error')}"]
    warnings = []
    parts = tuple(int(part) for part in re.findall(r"[0-9]{1,6}", version)[:2])
    if parts < MIN_PYTHON:
        warnings.append(f"{spec.python} is Python {version}, need 3.10 or newer")
    if python.get("torch") is None:
        warnings.append(f"{spec.python} cannot import torch: {python.get('torch_error')}")
    names = {device.vendor for device in found.devices if device.emulated is None}
    for name in sorted(names & vendors.keys()):
        plugin = vendors[name].torch_plugin
        if not plugin or python["plugins"] is None:
            continue
        what = f"{vendors[name].title} needs {plugin}, which {spec.python}"
        if plugin in python["plugin_errors"]:
            why = python["plugin_errors"][plugin]
            warnings.append(
                f"{what} cannot import: {why}; source its SDK's environment in `activate`"
            )
        elif plugin not in python["plugins"]:
            warnings.append(f"{what} does not have")
    return warnings


# --- network ----------------------------------------------------------------------------------------------


def _nic_warnings(spec: HostSpec, nics: tuple[Nic, ...]) -> list[str]:
    """Say what of the inventory does not fit the interfaces that are there."""
    if not nics:
        return ["no network interface could be listed"]
    warnings = []
    by_name = {nic.name: nic for nic in nics}
    if spec.nic is not None and spec.nic not in by_name:
        warnings.append(f"no interface {spec.nic}; there are {', '.join(sorted(by_name)[:12])}")
    elif spec.nic is not None and not by_name[spec.nic].up:
        warnings.append(f"interface {spec.nic} is down")
    addresses = {address for nic in nics for address in nic.addresses}
    if not addresses:
        warnings.append("no address of an interface could be found")
    elif spec.connection is Connection.SSH and _is_elsewhere(spec.data_addr, addresses):
        warnings.append(f"data_addr {spec.data_addr} is on none of its interfaces")
    return warnings


def _is_elsewhere(addr: str | None, addresses: set[str]) -> bool:
    """True for a numeric address that is not among these."""
    try:
        wanted = ipaddress.ip_address(addr or "")
    except ValueError:
        return False  # a name may be right; launch resolves it
    return wanted not in {ipaddress.ip_address(address) for address in addresses}
