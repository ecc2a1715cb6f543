"""Builds what a host's script prints, from sections of captured text."""

from collections.abc import Mapping

NONCE = "0123456789abcdef"
END_S = 1_790_000_000.25

# What a small machine with two interfaces and no accelerator says.
PLAIN: Mapping[str, str] = {
    "kernel": "Linux 6.1.0-18-amd64 x86_64\n",
    "cores": "16\n",
    "cpuinfo": "model name\t: Intel(R) Xeon(R) Processor\n",
    "memory": "MemTotal:       65831044 kB\nmax\n",
    "shm": "Filesystem 1024-blocks Used Available Capacity Mounted on\n"
    "tmpfs 32915520 0 32915520 0% /dev/shm\n",
    "disk": "Filesystem 1024-blocks Used Available Capacity Mounted on\n"
    "/dev/mapper/vg root 264212084 27285092 79105820 26% /\n",
    "pci": "0000:00:00.0 0x8086 0x0d57 0x060000\n0000:00:03.0 0x1af4 0x1041 0x020000\n",
    "nics": "eth0 1500 up 25000\neth1 9000 down -1\nlo 65536 unknown -1\n",
    "addresses": '[{"ifname":"lo","addr_info":[{"family":"inet","local":"127.0.0.1"}]},'
    '{"ifname":"eth0","addr_info":[{"family":"inet","local":"192.0.2.2"},'
    '{"family":"inet6","local":"fe80::1"},{"family":"inet6","local":"2001:db8::2"}]}]\n',
    "routes": "",
    "nodes": "",
    "python": '\n{"path": "/opt/py/bin/python3", "version": "3.11.2", "torch": "2.6.0+cpu", "plugins": []}\n',
    "tool-cpu-0": '{"lscpu": [{"field": "Architecture:", "data": "x86_64"}, {"field": "CPU(s):", "data": "32"}, '
    '{"field": "Model name:", "data": "Intel(R) Xeon(R) Gold 6338"}]}\n',
}


def output(
    sections: Mapping[str, str | bytes],
    *,
    rc: Mapping[str, int] | None = None,
    stderr: Mapping[str, str] | None = None,
    end: bool = True,
) -> bytes:
    """Return the script's output; rc is 0 unless said."""
    text = b"noise of a start file\n"
    for name, body in sections.items():
        data = body if isinstance(body, bytes) else body.encode()
        code = (rc or {}).get(name, 0)
        text += f"\n{NONCE} out {name} {code} {len(data)}\n".encode() + data
        if stderr and name in stderr:
            text += f"\n{NONCE} err {name}\n{stderr[name]}".encode()
    if end:
        text += f"\n{NONCE} end {END_S - 3} {END_S}\n".encode()
    return text
