"""Which device, which port, which GID: from the facts of several kits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glm_launch.nodes import fabric


def codes(found) -> list[str]:
    return [finding.code for finding in found]


def test_a_gb10_pair_uses_the_port_that_holds_its_address(kit) -> None:
    choices, found = fabric.choose(kit("gb10-pair").endpoints)
    assert not found
    assert [choice.nic for choice in choices] == ["enp1s0f1np1"] * 2
    assert [choice.hcas for choice in choices] == [("rocep1s0f1:1",)] * 2
    assert choices[0].environment("192.168.177.11") == {
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_IB_HCA": "=rocep1s0f1:1",
        "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
        "VLLM_HOST_IP": "192.168.177.11",
    }
    assert "GID 3 is RoCE v2 of 192.168.177.11 on enp1s0f1np1" in " ".join(choices[0].why)


def test_the_index_of_the_gid_means_nothing(kit) -> None:
    def move(node) -> None:
        for gid in node["hcas"][3]["gids"]:
            gid["index"] += 4

    choices, found = fabric.choose(kit("gb10-pair").with_(move).endpoints)
    assert not found
    assert "GID 7" in " ".join(choices[1].why)
    assert "NCCL_IB_GID_INDEX" not in choices[1].environment("192.168.177.12")


def test_a_second_rail_is_used_only_with_the_same_address(kit) -> None:
    twin = fabric.choose(kit("gb10-pair").endpoints)[0][0]
    assert not any("roceP2p1s0f1" in name for name in twin.hcas)


def test_a_workstation_pair_without_rdma_uses_sockets(kit) -> None:
    choices, found = fabric.choose(kit("rtx6000-pair").endpoints)
    assert not found
    assert [choice.hcas for choice in choices] == [(), ()]
    assert "sockets" in " ".join(choices[0].why)
    _, found = fabric.choose(kit("rtx6000-pair").endpoints, require_rdma=True)
    assert codes(found) == ["no-rdma"]
    assert "ws1, ws2" in found[0].seen


def drop_gid(node) -> None:
    node["hcas"][3]["gids"] = node["hcas"][3]["gids"][:2]


def set_mtu(node) -> None:
    node["nics"][4]["mtu"] = 1500


def pull_cable(node) -> None:
    node["nics"][4]["carrier"] = False


def other_network(node) -> None:
    node["nics"][4]["addresses"] = ["192.168.177.12/30"]


def no_address(node) -> None:
    node["nics"][4]["addresses"] = []


def inactive(node) -> None:
    node["hcas"][3]["state"] = "INIT"


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (drop_gid, ["no-gid", "no-rdma"], "rocep1s0f1:1 index 1 RoCE v2 fe80"),
        (set_mtu, ["mtu-differs"], "spark-b enp1s0f1np1 1500"),
        (pull_cable, ["link-down"], "enp1s0f1np1 (192.168.177.12) has no link"),
        (other_network, ["other-subnet"], "spark-b 192.168.177.12/30"),
        (no_address, ["address-not-here"], "enP7s7 10.20.0.12/24"),
        (inactive, ["hca-inactive", "no-rdma"], "rocep1s0f1 port 1 is INIT"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_seen(kit, change, expected, said) -> None:
    _, found = fabric.choose(kit("gb10-pair").with_(change).endpoints)
    assert codes(found) == expected
    assert said in found[0].seen
    assert all(finding.why and finding.fix for finding in found)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"nic": "enp1s0f1np1", "hca": "rocep1s0f1"}, []),
        ({"hca": "rocep1s0f1:1", "gid_index": 3}, []),
        ({"nic": "wlP9s9"}, ["nic-without-address"]),
        ({"hca": "mlx5_0"}, ["no-such-hca", "no-rdma"]),
        ({"hca": "roceP2p1s0f1"}, ["hca-without-gid", "no-rdma"]),
    ],
)
def test_overrides_are_verified(kit, override, expected) -> None:
    first, second = kit("gb10-pair").endpoints
    choices, found = fabric.choose([first, replace(second, **override)])
    assert codes(found) == expected
    if override.get("gid_index") is not None:
        assert choices[1].environment("192.168.177.12")["NCCL_IB_GID_INDEX"] == "3"


def test_a_full_packet_fits(kit) -> None:
    assert fabric.ping_size(9000) == 8972
