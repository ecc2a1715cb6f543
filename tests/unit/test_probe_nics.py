from collections.abc import Mapping

from hetrun.model import Nic
from hetrun.probe.answer import read_answer
from hetrun.probe.nics import find_nics
from tests.unit.probe_output import NONCE, PLAIN, output

IP_TEXT = """1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue qlen 1000
    link/loopback 00:00:00:00:00:00 brd 00:00:00:00:00:00
    inet 127.0.0.1/8 scope host lo
2: eth0@if7: <BROADCAST,MULTICAST,UP,LOWER_UP> mtu 1500 qdisc noqueue
    link/ether 02:42:c0:00:02:02 brd ff:ff:ff:ff:ff:ff
    inet 192.0.2.2/24 brd 192.0.2.255 scope global eth0
    inet6 2001:db8::2/64 scope global
    inet6 fe80::42/64 scope link
3: tun0: <POINTOPOINT,UP> mtu 1400
    inet 198.51.100.2 peer 198.51.100.1/32 scope global tun0
"""
PROC = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t006433C6\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0

           |-- 127.0.0.1
              /32 host LOCAL
--
           |-- 192.0.2.2
              /32 host LOCAL
--
           |-- 198.51.100.9
              /32 host LOCAL
--
           |-- 203.0.113.5
              /32 host LOCAL

00000000000000000000000000000001 01 80 10 80       lo
20010db8000000000000000000000002 02 40 00 82     eth0
fe8000000000000000fc00fffe000001 02 40 20 80     eth0
"""


def nics(**sections: str) -> dict[str, Nic]:
    changed: Mapping[str, str] = {**PLAIN, **sections}
    return {nic.name: nic for nic in find_nics(read_answer(output(changed), nonce=NONCE))}


def test_kernel_tells_speed_and_state_and_ip_the_addresses() -> None:
    found = nics()
    assert found["eth0"] == Nic(
        name="eth0", addresses=("192.0.2.2", "2001:db8::2"), speed_mbps=25000, mtu=1500, up=True
    )
    assert (found["eth1"].up, found["eth1"].speed_mbps) == (False, None)
    assert (found["lo"].up, found["lo"].addresses) == (True, ("127.0.0.1",))


def test_ip_without_json_is_read_too() -> None:
    found = nics(addresses=IP_TEXT)
    assert found["eth0"].addresses == ("192.0.2.2", "2001:db8::2")
    assert found["tun0"].addresses == ("198.51.100.2",)


def test_bare_container_tells_addresses_through_proc() -> None:
    found = nics(addresses="", routes=PROC)
    assert found["eth0"].addresses == ("192.0.2.2", "2001:db8::2")
    assert found["eth1"].addresses == ("198.51.100.9",)
    assert found["lo"].addresses == ("127.0.0.1", "::1")
    assert all("203.0.113.5" not in nic.addresses for nic in found.values())


def test_names_lose_control_characters() -> None:
    assert set(nics(nics="e\x1b[31mth0 1500 up 10\n", addresses="")) == {"eth0"}


def test_broken_json_gives_interfaces_without_addresses() -> None:
    for text in (
        "[" * 10_000,
        '[{"ifname": 3}]',
        '{"a": 1}',
        '[{"addr_info": 5}]',
        '[{"addr_info": [7]}]',
    ):
        assert nics(addresses=text)["eth0"].addresses == ()
