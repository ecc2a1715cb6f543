"""The one sh script that a host runs. What its answer means is decided in `answer.py` and beside it.

Plain POSIX sh, no Python needed. Nothing in it may hang: each command has closed input, its own output
files with a size limit, and a time limit that holds even where a wedged driver makes it unkillable.
Values of the user's `env` are exported by the script itself, so that no process list shows them.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetrun.model import HostSpec
from hetrun.vendors import ProbeCommand, Vendor

CPU = "cpu"
TOOL_TIMEOUT_S = 15
PYTHON_TIMEOUT_S = 60
PLUGIN_TIMEOUT_S = 20  # for importing one torch plug-in
BASE_TIMEOUT_S = 5
PEERS_TIMEOUT_S = 20  # for the names of all other hosts together
LOOKUP_TIMEOUT_S = 4  # for one of them
LOOKUPS_AT_ONCE = 64
MAX_COMMANDS_PER_VENDOR = 4
SCRIPT_TIMEOUT_S = 120.0  # over all of the above
MAX_STDOUT = 256 << 10
MAX_STDERR = 8 << 10
MAX_OUTPUT = 16 << 20

_SAFE_PATH = re.compile(r"/[A-Za-z0-9._/*?+\[\]-]*")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")

_PRELUDE = r"""
LC_ALL=C; LANG=C; export LC_ALL LANG; unset LANGUAGE
t_start=$(date +%s.%N)
t_start=${t_start%.%N} # where busybox knows no nanoseconds
umask 077
d=
for base in /dev/shm "${TMPDIR:-/tmp}" /tmp /var/tmp "$HOME"; do
  d=$base/hetrun-probe.$nonce
  if mkdir "$d" 2>/dev/null; then # what is there already is not ours to remove
    (echo 1 >"$d/x") 2>/dev/null && [ -s "$d/x" ] && break
    rm -rf "$d" 2>/dev/null
  fi
  d=
done
if [ -z "$d" ]; then printf '\n%s full\n' "$nonce"; exit 1; fi
trap 'rm -rf "$d"' 0
trap 'exit 1' HUP INT TERM
guard=none
if timeout -k 1 5 true 2>/dev/null; then guard=timeout
elif setsid true 2>/dev/null; then guard=setsid; fi
run() { # name, seconds, command: fills $d/name.out, .err and .rc, and returns in time whatever happens
  echo 1 >"$d/$1.busy"
  (
    exec </dev/null >"$d/$1.out" 2>"$d/$1.err"
    ulimit -f 4096
    text="$3
exit \$?"
    case $guard in
    timeout) exec timeout -k 1 "$2" "$shell" -c "$text" ;;
    setsid) exec setsid "$shell" -c "$text" ;;
    *) exec "$shell" -c "$text" ;; # kills no grandchildren, but waits for none either
    esac
  ) &
  p=$!
  (
    trap 'kill -9 $!; exit 0' TERM # -9: before it becomes sleep, the child would swallow a TERM
    sleep "$(($2 + 2))" &
    wait $!
    [ -f "$d/$1.busy" ] || exit 0
    echo 1 >"$d/$1.late"
    kill -9 -$p || kill -9 $p
  ) </dev/null >/dev/null 2>&1 &
  w=$!
  wait $p
  rc=$?
  rm -f "$d/$1.busy"
  kill $w
  case $rc in 124 | 137 | 143) kill -9 -$p ;; esac # children that ignore a TERM outlive their shell
  if [ -f "$d/$1.late" ]; then rc=124; fi
  echo $rc >"$d/$1.rc"
} 2>/dev/null
tool() { # name, tool, command: runs the command if there is such a tool and it did not hang before
  if [ -f "$d/$2.hung" ]; then echo 124 >"$d/$1.rc"
  elif command -v "$2" >/dev/null 2>&1; then run "$1" "$tool_timeout" "$3"
    case $rc in 124 | 137) echo 1 >"$d/$2.hung" ;; esac
  else echo 127 >"$d/$1.rc"; fi
}
show() { # name: prints what the command left
  rc=; size=0
  if [ -f "$d/$1.rc" ]; then read -r rc <"$d/$1.rc"; fi
  if [ -s "$d/$1.out" ]; then size=$(wc -c <"$d/$1.out"); fi
  printf '\n%s out %s %s %s\n' "$nonce" "$1" "${rc:-none}" "${size:-0}"
  if [ -s "$d/$1.out" ]; then head -c "$max_stdout" "$d/$1.out"; fi
  if [ -s "$d/$1.err" ]; then
    printf '\n%s err %s\n' "$nonce" "$1"
    head -c "$max_stderr" "$d/$1.err"
  fi
}
"""

# Section name -> command. Each reads the kernel's own files where a container may lack the tool.
_BASE: Mapping[str, str] = {
    "kernel": "uname -srm",
    "cores": "nproc || getconf _NPROCESSORS_ONLN || grep -c ^processor /proc/cpuinfo",
    "cpuinfo": "grep -m 1 -i '^model name' /proc/cpuinfo",
    "memory": "grep -m 1 ^MemTotal: /proc/meminfo; cat /sys/fs/cgroup/memory.max "
    "/sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; true",
    "shm": "df -kP /dev/shm",
    "pci": 'for f in /sys/bus/pci/devices/*; do [ -r "$f/class" ] || continue; '
    'read -r v <"$f/vendor"; read -r i <"$f/device"; read -r c <"$f/class"; '
    'echo "${f##*/} $v $i $c"; done',
    "nics": 'for f in /sys/class/net/*; do [ -e "$f/mtu" ] || continue; mtu=; state=; speed=; '
    'read -r mtu <"$f/mtu"; read -r state <"$f/operstate"; read -r speed <"$f/speed"; cd "$f" || cd /; '
    'echo "${f##*/} ${mtu:-0} ${state:-unknown} ${speed:--1} $(pwd -P)"; done 2>/dev/null; true',
    "addresses": "ip -j addr || ip addr",
    "limits": "cat /proc/self/limits",
    "numa": 'for f in /sys/bus/pci/devices/*; do n=-1; read -r n <"$f/numa_node"; '
    '[ "$n" -ge 0 ] && echo "${f##*/} $n"; done 2>/dev/null; true',
    # where ports and chips hang below the bridges: classes of networks, screens, accelerators
    "paths": 'for f in /sys/bus/pci/devices/*; do c=; read -r c <"$f/class"; case $c in '
    '0x02*|0x03*|0x07*|0x0b*|0x12*) cd "$f" && pwd -P;; esac; done 2>/dev/null; true',
    "rdma": 'for p in /sys/class/infiniband/*/ports/*; do [ -e "$p/state" ] || continue; '
    'd=${p%/ports/*}; l=; s=; r=; n=; i=-1; read -r l <"$p/link_layer"; read -r s <"$p/state"; '
    'read -r r <"$p/rate"; read -r i <"$d/device/numa_node"; b=$(readlink "$d/device"); '
    'for f in "$d"/device/net/*; do [ -e "$f" ] && n=${f##*/} && break; done; '
    'read -r n <"$p/gid_attrs/ndevs/0"; '  # of this port, where the kernel tells it
    'printf "%s\\t%s\\t%s\\t%s\\t%s\\t%s\\t%s\\t%s\\n" "${d##*/}" "${p##*/}" "$l" "$s" "$r" "$n" '
    '"${b##*/}" "$i"; done 2>/dev/null; true',
    "gids": 'for p in /sys/class/infiniband/*/ports/*; do [ -d "$p/gids" ] || continue; '
    'grep -H "RoCE v2" "$p"/gid_attrs/types/*; '  # reading an unused entry is an error
    'grep -Hv "^0000:0000:0000:0000:0000:0000:0000:0000" "$p"/gids/*; done 2>/dev/null; true',
    "routes": "cat /proc/net/route; echo; grep -B 1 'host LOCAL' /proc/net/fib_trie; echo; "
    "cat /proc/net/if_inet6 2>/dev/null; true",
}

# The inner time limit is root's own: a user cannot end what sudo started. Where sudo asks for a password, the tool
# runs as it would without it, and the section "become" tells why.
_AS_ROOT = (
    'if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then '
    'exec sudo -n env PATH="$PATH" timeout -k 1 {seconds} "$shell" -c {command}; '
    'else exec "$shell" -c {command}; fi'
)

# Each answer is printed at once, so that those of lookups which run beside each other do not mix.
_LOOK_UP = """
t=; if timeout -k 1 1 true 2>/dev/null; then t="timeout -k 1 {seconds}"; fi
ask() {{
  if command -v getent >/dev/null 2>&1; then r=$($t getent ahosts "$1" 2>/dev/null)
  else r=$(grep -iwF -e "$1" /etc/hosts) || return; fi
  printf 'name %s\\n%s\\n' "$1" "$r"
}}
n=0
for h in {words}; do
  ask "$h" &
  n=$((n+1)); if [ $n -ge {at_once} ]; then wait; n=0; fi
done
wait
"""

# torch may print on its own, so the answer is one line that is JSON.
_PYTHON = """
import json, sys
found = {"path": sys.executable, "version": ".".join(str(part) for part in sys.version_info[:3])}
try:
    import torch
    found["torch"] = str(torch.__version__)
except BaseException as error:
    found["torch_error"] = type(error).__name__ + ": " + str(error)
def say():
    sys.stdout.write("\\n" + json.dumps(found) + "\\n")
    sys.stdout.flush()
try:
    import importlib.util, subprocess
    limit_s, names = float(sys.argv[1]), sys.argv[2:]
    found["plugins"] = [name for name in names if importlib.util.find_spec(name.split(".")[0])]
    found["plugin_errors"] = {}
    say()  # in case a plug-in takes this process along
    for name in found["plugins"]:  # each in a process of its own: two of them may not get on
        try:
            done = subprocess.run(
                [sys.executable, "-c", "import torch; import " + name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=limit_s,
            )
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            if done.returncode:
                said = lines[-1] if lines else "no word"
                found["plugin_errors"][name] = said + " (exit code %d)" % done.returncode
        except subprocess.TimeoutExpired:
            found["plugin_errors"][name] = "its import takes more than %g s" % limit_s
except BaseException as error:
    found["plugins_error"] = type(error).__name__ + ": " + str(error)
say()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSection:
    """Where the answer of one vendor command will stand."""

    section: str
    vendor: str
    command: ProbeCommand


def tool_sections(spec: HostSpec, vendors: Mapping[str, Vendor]) -> tuple[ToolSection, ...]:
    """Return the commands of all vendors with the names of their sections, in a fixed order.

    A host that plays emulated chips is not asked for real ones, only for its processor.
    """
    return tuple(
        ToolSection(section=f"tool-{name}-{index}", vendor=name, command=command)
        for name, vendor in sorted(vendors.items())
        if name == CPU or not spec.emulate
        for index, command in enumerate(vendor.probe_commands[:MAX_COMMANDS_PER_VENDOR])
    )


def topology_sections(spec: HostSpec, vendors: Mapping[str, Vendor]) -> tuple[ToolSection, ...]:
    """Return the commands that tell what joins a vendor's devices, in the order of vendors' names."""
    return tuple(
        ToolSection(section=f"topo-{name}", vendor=name, command=vendor.topology_command)
        for name, vendor in sorted(vendors.items())
        if vendor.topology_command is not None and not spec.emulate
    )


def ports_sections(spec: HostSpec, vendors: Mapping[str, Vendor]) -> tuple[ToolSection, ...]:
    """Return the commands that tell of ports inside a vendor's devices, in the order of vendors' names."""
    return tuple(
        ToolSection(section=f"ports-{name}", vendor=name, command=vendor.ports_command)
        for name, vendor in sorted(vendors.items())
        if vendor.ports_command is not None and not spec.emulate
    )


def probe_script(
    spec: HostSpec, vendors: Mapping[str, Vendor], *, nonce: str, peers: Sequence[str] = ()
) -> str:
    """Return the script for one host; `nonce` marks its sections, so that no output can forge one.

    `peers` are names of other hosts, to be looked up there.

    Vendor tools run beside each other, the commands of one vendor after each other (some drivers take few
    clients at a time).
    """
    lanes = [[_run(name, BASE_TIMEOUT_S, command) for name, command in _base(spec, vendors)]]
    lanes.append([_run("python", PYTHON_TIMEOUT_S, _python_command(spec, vendors))])
    lanes.append([_run("names", BASE_TIMEOUT_S, _names(spec))])  # a dead resolver is slow
    if peers:
        lanes.append([_run("peer-names", PEERS_TIMEOUT_S, _peer_names(peers))])
    tools = [*tool_sections(spec, vendors), *topology_sections(spec, vendors)]
    tools += ports_sections(spec, vendors)
    for vendor in dict.fromkeys(tool.vendor for tool in tools):
        mine = [tool for tool in tools if tool.vendor == vendor]
        lanes.append([line for tool in mine for line in _tool(tool, spec)])
    names = [name for name, _ in _base(spec, vendors)]
    names += [
        "python",
        "names",
        *(["peer-names"] if peers else []),
        *(tool.section for tool in tools),
    ]
    lines = [f"nonce={shlex.quote(nonce)}", f"tool_timeout={TOOL_TIMEOUT_S}"]
    lines += [f"max_stdout={MAX_STDOUT}", f"max_stderr={MAX_STDERR}"]
    lines += [f"{key}={shlex.quote(value)}; export {key}" for key, value in spec.env.items()]
    shell = "$(command -v bash || echo sh)" if spec.activate else "sh"  # vendors' scripts want bash
    lines += [f"shell={shell}; export shell", _PRELUDE]
    lines.append("lanes=")
    for lane in lanes:
        lines += ["(", *lane, ') </dev/null >/dev/null 2>&1 & lanes="$lanes $!"']
    lines.append("wait $lanes")
    lines += [f"for name in {' '.join(names)}; do show $name; done"]
    lines.append("t_end=$(date +%s.%N); t_end=${t_end%.%N}")
    lines.append('printf \'\\n%s end %s %s\\n\' "$nonce" "$t_start" "$t_end"')
    return "\n".join(lines) + "\n"


def _run(name: str, timeout_s: int, command: str) -> str:
    return f"run {name} {timeout_s} {shlex.quote(command)}"


def _base(spec: HostSpec, vendors: Mapping[str, Vendor]) -> list[tuple[str, str]]:
    """Return sections that need no vendor tool."""
    work_dir = shlex.quote(spec.work_dir) if spec.work_dir else '"${XDG_CACHE_HOME:-$HOME/.cache}"'
    found = dict(_BASE)
    found["disk"] = (
        f'w={work_dir}; while [ -n "$w" ] && [ ! -e "$w" ]; do w=${{w%/*}}; done; df -kP "${{w:-/}}"'
    )
    patterns = _safe(
        node for vendor in vendors.values() for node in (*vendor.device_nodes, *vendor.slice_nodes)
    )
    found["nodes"] = (
        f'for f in {" ".join(patterns)}; do [ -e "$f" ] || continue; [ -d "$f" ] && continue; '
        'o=closed; [ -r "$f" ] && [ -w "$f" ] && o=open; echo "$o $(ls -ld "$f")"; done'
    )
    modules = sorted({name for item in vendors.values() for name in item.peer_memory_modules})
    found["peers"] = (
        'for f in /sys/kernel/mm/memory_peers/*; do [ -d "$f" ] && echo "${f##*/}"; done; '
        f"for m in {' '.join(filter(_TOOL_NAME.fullmatch, modules))}; do "
        '[ -d "/sys/module/$m" ] && echo "$m"; done; true'
    )
    found["sdk"] = "".join(
        f'for f in {root}; do [ -d "$f" ] || continue; v=; '
        "for g in .info/version version.txt version.json version; do "
        '[ -r "$f/$g" ] && v=$(head -c 400 "$f/$g" | tr "\\n\\t" "  ") && break; done; '
        f'printf "%s\\t%s\\t%s\\n" {shlex.quote(name)} "$(readlink -f "$f")" "$v"; done; '
        for name, vendor in vendors.items()
        for root in _safe(vendor.sdk_roots)
    )
    if spec.become:
        found["become"] = "sudo -n true"
    if spec.emulate:
        for name in ("pci", "nodes", "numa", "paths", "sdk"):
            del found[name]
    return [(name, command) for name, command in found.items() if command]


def _names(spec: HostSpec) -> str:
    """Return the command that resolves, on the host itself, its own name and the one in the inventory."""
    named = [name for name in (spec.data_addr, spec.addr) if name and not _is_number(name)]
    words = " ".join(shlex.quote(name) for name in dict.fromkeys(named))
    return (
        'n=$(hostname 2>/dev/null) || read -r n </proc/sys/kernel/hostname; echo "own $n"; '
        f'for h in "$n" {words}; do echo "name $h"; '
        'getent ahosts "$h" 2>/dev/null || grep -iwF -e "$h" /etc/hosts; done; true'
    )


def _peer_names(names: Sequence[str]) -> str:
    """Return the command that resolves names of other hosts, many at once, each with its own time limit.

    One that has no answer in time does not resolve. Without getent only /etc/hosts can be read: a name that
    is not in there is not told.
    """
    words = " ".join(shlex.quote(name) for name in names)
    return _LOOK_UP.format(words=words, seconds=LOOKUP_TIMEOUT_S, at_once=LOOKUPS_AT_ONCE)


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _tool(tool: ToolSection, spec: HostSpec) -> list[str]:
    """Return the lines that run one vendor command, with the vendor's own folders after PATH."""
    lines = []
    if folders := _safe(tool.command.paths):
        lines.append(f'for f in {" ".join(folders)}; do [ -d "$f" ] && PATH=$PATH:$f; done')
    command = _activated(spec, tool.command.command)
    if spec.become and tool.command.needs_root:
        command = _AS_ROOT.format(command=shlex.quote(command), seconds=TOOL_TIMEOUT_S)
    first = tool.command.command.split()[0]
    if _TOOL_NAME.fullmatch(first):
        lines.append(f"tool {tool.section} {first} {shlex.quote(command)}")
    else:
        lines.append(_run(tool.section, TOOL_TIMEOUT_S, command))
    return lines


def _python_command(spec: HostSpec, vendors: Mapping[str, Vendor]) -> str:
    plugins = sorted({vendor.torch_plugin for vendor in vendors.values() if vendor.torch_plugin})
    limit_s = str(PLUGIN_TIMEOUT_S)
    return _activated(spec, shlex.join([spec.python, "-c", _PYTHON, limit_s, *plugins]))


def _activated(spec: HostSpec, command: str) -> str:
    """Return the command with the host's activation script sourced before it, as a run does it."""
    if spec.activate is None:
        return command
    script = shlex.quote(spec.activate)
    complain = f"echo cannot read {script} >&2"
    return f"[ -r {script} ] || {{ {complain}; exit 1; }}\n. {script} >/dev/null\n{command}"


def _safe(patterns: Iterable[str]) -> list[str]:
    """Return patterns that hold nothing but path characters; they stand unquoted, to be expanded."""
    return sorted({pattern for pattern in patterns if _SAFE_PATH.fullmatch(pattern)})
