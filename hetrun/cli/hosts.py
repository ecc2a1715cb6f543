"""What probe found as rich renderables: hosts, islands, warnings, changes. Where they are written is left to `render.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hetrun.cli.tables import cell, new_table, stack
from hetrun.model import Connection, Device, Facts, HostFacts, Nic, RdmaNic
from hetrun.probe import Change, ChangeKind, loopback_names, nearest_nics
from hetrun.report.words import NOT_KNOWN, count, format_bytes, format_quantity, some
from hetrun.vendors import all_vendors

MOST_ROWS = 16  # hosts; above that, equal hosts share their rows
MOST_NAMES = 3
_HEADS = (
    *("Host", "Vendor", "Model", ">Count", ">Memory", "Driver, SDK"),
    *("Interpreter", "Links", ">Warnings"),
)
ONE_TABLE_WIDTH = 110
_DEVICES, _REST = (0, 1, 2, 3, 4, 5, 8), (0, 6, 7)  # columns of the two tables of a narrow screen
_NOT_A_PORT = re.compile(r"(?:lo|docker|veth|br-|virbr|cni|flannel|cali|tunl|dummy|kube)")
_STYLES = {ChangeKind.ADDED: "green", ChangeKind.REMOVED: "red", ChangeKind.CHANGED: "yellow"}
_SIGNS = {ChangeKind.ADDED: "+", ChangeKind.REMOVED: "-", ChangeKind.CHANGED: "~"}


def facts_view(facts: Facts) -> RenderableType:
    """Devices by host, islands, hosts that did not answer, warnings; the same words of many hosts only once."""
    table = _Hosts(facts)
    devices = [device for host in facts.hosts for device in host.devices]
    vendors = {device.vendor for device in devices}
    silent = [host for host in facts.hosts if host.error is not None]
    summary = (
        f"{count(len(facts.hosts), 'host')}, {count(len(devices), 'device')} "
        f"of {count(len(vendors), 'vendor')}"
    )
    if silent:
        summary += f"; {count(len(silent), 'host')} did not answer"
    errors = [(host.spec.name, str(host.error)) for host in silent]
    notes = [(host.spec.name, note) for host in facts.hosts for note in _notes(host)]
    parts: list[RenderableType] = [table]
    if len(facts.hosts) > 1 and vendors:
        parts.append(_islands(facts))
    lines = [*_lines(errors, "red"), *_lines(notes, "yellow"), *_own_names(facts)]
    return stack(*parts, Text(summary, style="bold"), *lines)


def changes_view(changes: Sequence[Change], old: str) -> RenderableType:
    """What changed since an earlier probe; the same change of many hosts only once."""
    if not changes:
        return cell(f"nothing changed since {old}", "dim")
    hosts: dict[tuple[ChangeKind, str], list[str]] = {}
    for change in changes:
        hosts.setdefault((change.kind, change.what), []).append(change.host)
    lines = [
        cell(f"{_SIGNS[kind]} {some(names, MOST_NAMES)}: {what}", _STYLES[kind])
        for (kind, what), names in hosts.items()
    ]
    return stack(Text(f"{count(len(changes), 'change')} since {old}", style="bold"), *lines)


class _Hosts:
    """The table of hosts; on a narrow screen interpreter and links stand in a second one, so that no word breaks."""

    def __init__(self, facts: Facts) -> None:
        self._rows = [
            (cell(some(names, MOST_NAMES) if index == 0 else ""), *row)
            for names, rows in _grouped(facts.hosts)
            for index, row in enumerate(rows)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= ONE_TABLE_WIDTH:
            table = new_table(*_HEADS)
            for row in self._rows:
                table.add_row(*row)
            yield from (table, Text())
            return
        first, second = (new_table(*(_HEADS[at] for at in part)) for part in (_DEVICES, _REST))
        name = cell("")
        for row in self._rows:
            name = row[0] if row[0].plain else name
            first.add_row(*(row[at] for at in _DEVICES))
            if any(row[at].plain for at in _REST[1:]):
                second.add_row(name, *(row[at] for at in _REST[1:]))
                name = cell("")
        yield from (first, Text())
        if second.row_count:
            yield from (second, Text())


# --- hosts ------------------------------------------------------------------------------------------------


def _grouped(hosts: Sequence[HostFacts]) -> Iterable[tuple[list[str], list[tuple[Text, ...]]]]:
    """Yield names of hosts and their rows; where there are many hosts, equal ones stand together."""
    if len(hosts) <= MOST_ROWS:
        for host in hosts:
            yield [host.spec.name], list(_host_rows(host))
        return
    groups: dict[tuple[tuple[str, ...], ...], tuple[list[str], list[tuple[Text, ...]]]] = {}
    for host in hosts:
        rows = list(_host_rows(host))
        key = tuple(tuple(text.plain for text in row) for row in rows)
        groups.setdefault(key, ([], rows))[0].append(host.spec.name)
    yield from groups.values()


def _host_rows(host: HostFacts) -> Iterable[tuple[Text, ...]]:
    """Yield a row per kind of device, without the host's name."""
    if host.error is not None:
        yield cell("no answer", "red"), *[cell("")] * 7
        return
    interpreter = f"torch {host.torch_version}" if host.torch_version else "no torch"
    if host.python_version:
        interpreter = f"Python {host.python_version}, {interpreter}"
    num_notes = len(_notes(host))
    notes = cell(num_notes, "yellow") if num_notes else cell("")
    network = _network(host)
    if not host.devices:
        yield (
            *(cell("no device", "yellow"), *[cell("")] * 4),
            *(cell(interpreter), cell(network), notes),
        )
        return
    kinds: dict[tuple[str, str, str, str], list[Device]] = {}
    for device in host.devices:
        kinds.setdefault(_device_cells(device), []).append(device)
    for index, ((vendor, model, memory, driver), devices) in enumerate(kinds.items()):
        first = index == 0
        near = _near(host, devices)
        links = ", ".join(filter(None, (_inside(host, devices), near, network if first else "")))
        yield (
            *(cell(vendor), cell(model), cell(len(devices)), cell(memory), cell(driver)),
            *(cell(interpreter if first else ""), cell(links), notes if first else cell("")),
        )


def _device_cells(device: Device) -> tuple[str, str, str, str]:
    model = device.model or "unknown model"
    if device.emulated is not None:
        model = f"{model} (emulated)"
    memory = format_quantity(device.memory, format_bytes)
    driver = ", ".join(filter(None, (device.driver, _short_sdk(device.sdk))))
    return device.vendor, model, memory, driver or NOT_KNOWN


def _short_sdk(sdk: str | None) -> str | None:
    """The toolkit's folder and version in one word or two: "/opt/x-12.4 12.4.1" -> "x-12.4"."""
    words = (sdk or "").split()
    folders = [at for at, word in enumerate(words) if word.startswith("/")]
    if not folders:
        return sdk
    name = words[folders[-1]].rstrip("/").rpartition("/")[2]
    version = " ".join(words[folders[-1] + 1 :])
    return name if any(char.isdigit() for char in name) or not version else f"{name} {version}"


def _notes(host: HostFacts) -> list[str]:
    notes = list(host.warnings)
    if host.torch_error and not any("torch" in warning for warning in host.warnings):
        notes.append(f"torch: {host.torch_error}")
    return notes


# --- links ------------------------------------------------------------------------------------------------


def _inside(host: HostFacts, devices: Sequence[Device]) -> str:
    """What joins these devices inside the host, such as "NV12/SYS"; empty where no tool told."""
    mine = {device.index for device in devices}
    kinds = {link.kind for link in host.device_links if link.a in mine and link.b in mine}
    return "/".join(sorted(kinds))


def _near(host: HostFacts, devices: Sequence[Device]) -> str:
    """How near the nearest RDMA port is, such as "NIC PIX"; ports inside the devices; empty where neither is known."""
    kinds = {near[0] for device in devices if (near := nearest_nics(host, device.index))}
    mine = {device.index for device in devices}
    ports = [port for port in host.device_ports if port.device in mine]
    parts = [f"NIC {'/'.join(sorted(kinds))}"] if kinds else []
    if ports:
        num_usable = sum(bool(port.up and port.address) for port in ports)
        parts.append(f"RoCE inside ({num_usable} of {len(ports)} usable)")
    return ", ".join(parts)


def _network(host: HostFacts) -> str:
    """The interface that leads out, RDMA ports by kind, GPUDirect."""
    parts = []
    if nic := _main_nic(host):
        speed = f" {nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps else ""
        parts.append(f"{nic.name}{speed}{'' if nic.up else ' (down)'}")
    ports: dict[str, int] = {}
    for port in host.rdma:
        name = _port(port)
        ports[name] = ports.get(name, 0) + 1
    parts += [f"{number} x {name}" if number > 1 else name for name, number in ports.items()]
    if host.peer_memory:
        parts.append("GPUDirect")
    return ", ".join(parts)


def _port(port: RdmaNic) -> str:
    layer = {"Ethernet": "RoCE", "InfiniBand": "InfiniBand"}.get(port.link_layer or "", "RDMA")
    rate = "" if port.rate_gbps is None else f" {port.rate_gbps:g} Gbit/s"
    gid = "" if port.gid_index is None else f" (gid {port.gid_index})"
    return f"{layer}{rate}{gid}" if port.active else f"{layer} (down)"


def _main_nic(host: HostFacts) -> Nic | None:
    """The interface named in the inventory or holding its address, else the fastest with an address."""
    for nic in host.nics:
        if nic.name == host.spec.nic or (host.spec.data_addr or host.spec.addr) in nic.addresses:
            return nic
    usable = [nic for nic in host.nics if nic.addresses and not _NOT_A_PORT.match(nic.name)]
    return max(usable, key=lambda nic: (nic.up, nic.speed_mbps or 0), default=None)


# --- islands, lines ---------------------------------------------------------------------------------------


def _islands(facts: Facts) -> Table:
    """Devices that one collective library joins, by vendor."""
    table = new_table("Island", ">Devices", ">Hosts", "Models", "Library")
    islands: dict[str, list[tuple[str, Device]]] = {}
    for host in facts.hosts:
        for device in host.devices:
            islands.setdefault(device.vendor, []).append((host.spec.name, device))
    for name, members in sorted(islands.items()):
        models: dict[str, int] = {}
        for _, device in members:
            models[device.model or "unknown model"] = (
                models.get(device.model or "unknown model", 0) + 1
            )
        vendor = all_vendors().get(name)
        library = "unknown" if vendor is None else vendor.collective_family
        if all(device.emulated for _, device in members):
            library = "emulated"
        table.add_row(
            *(cell(name), cell(len(members)), cell(len({host for host, _ in members}))),
            cell(", ".join(f"{number} x {model}" for model, number in models.items())),
            cell(library),
        )
    return table


def _lines(notes: Sequence[tuple[str, str]], style: str) -> list[Text]:
    hosts: dict[str, list[str]] = {}
    for host, note in notes:
        hosts.setdefault(note, []).append(host)
    return [cell(f"{some(names, MOST_NAMES)}: {note}", style) for note, names in hosts.items()]


def _own_names(facts: Facts) -> list[Text]:
    """Say which hosts mean only themselves by their own name: it misleads libraries that meet by name."""
    found = [
        host.spec.name
        for host in facts.hosts
        if host.spec.connection is Connection.SSH
        and host.hostname is not None
        and host.hostname in loopback_names(host.names)
    ]
    if not found:
        return []
    what = "own name is a loopback address; harmless here, jobs started by hand may meet by name"
    return [cell(f"{some(found, MOST_NAMES)}: {what}", "dim")]
