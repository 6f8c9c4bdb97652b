# SPDX-License-Identifier: Apache-2.0
"""What a tenant can do to the chunks of another one: nothing, as long as that one is within its part."""

from collections.abc import Callable

import pytest
from chunks import chain, save, there

from pd_connector.pool.store.catalog_ops import now_s
from pd_connector.pool.store.folder import charge_of
from pd_connector.pool.store.local import LocalStore

pytestmark = pytest.mark.usefixtures("patient")
CHARGE = charge_of(10_000)
Open = Callable[..., LocalStore]


def singles(name: str, chunks: int) -> list[bytes]:
    """Keys of chunks that do not follow each other."""
    return [chain(f"{name} {number}", 1)[0] for number in range(chunks)]


def held(store: LocalStore) -> dict[str, int]:
    """Chunks of the memory by tenant."""
    return {name: nbytes // CHARGE for name, nbytes in store.status().tiers[0].tenants.items()}


def use(store: LocalStore, keys: list[bytes]) -> None:
    """These chunks were used now."""
    assert all(there(store, [key]) for key in keys)
    store._tier_storage.flush()


def test_no_tenant_evicts_another_within_its_part(open_store: Open) -> None:
    store = open_store(10 * CHARGE)
    small = singles("small", 5)
    for key in small:
        save(store, [key], tenant="small")
    for key in singles("large", 30):
        assert save(store, [key], tenant="large") == 1
    assert sum(there(store, [key]) for key in small) == 5
    assert held(store) == {"small": 5, "large": 5}


def test_a_tenant_alone_may_use_everything_until_another_comes(open_store: Open) -> None:
    store = open_store(10 * CHARGE)
    for key in singles("first", 10):
        save(store, [key], tenant="first")
    for key in singles("second", 10):
        assert save(store, [key], tenant="second") == 1
    assert held(store) == {"first": 5, "second": 5}


def test_a_tenant_gets_its_part_from_one_whose_chunks_are_used_all_the_time(
    open_store: Open,
) -> None:
    store = open_store(10 * CHARGE)
    for key in singles("busy", 10):
        save(store, [key], tenant="busy")
    for key in singles("quiet", 8):
        assert save(store, [key], tenant="quiet") == 1
        use(store, [one for one in singles("busy", 10) if there(store, [one])])
    assert held(store) == {"quiet": 5, "busy": 5}


def test_pins_of_one_tenant_do_not_hide_what_others_can_have(open_store: Open) -> None:
    store = open_store(300 * CHARGE)
    for key in (pinned := singles("pinned", 66)):
        save(store, [key], tenant="large")
        store.pin([key], for_s=3600, holder="large")
    for key in singles("quiet", 70):
        save(store, [key], tenant="quiet")
    for key in (young := singles("large", 164)):
        save(store, [key], tenant="large")
    use(store, pinned)
    use(store, young)
    for key in singles("new", 10):
        assert save(store, [key], tenant="new") == 1
    assert sum(there(store, [key]) for key in pinned) == 66
    assert held(store) == {"quiet": 70, "large": 220, "new": 10}


@pytest.mark.parametrize("tenants", [1, 3])
def test_pins_keep_half_of_a_tenants_part_at_most(open_store: Open, tenants: int) -> None:
    store = open_store(36 * CHARGE)
    keys = {name: singles(name, 12) for name in ("a", "b", "c")}
    for name in keys:
        for key in keys[name]:
            save(store, [key], tenant=name)
            store.pin([key], for_s=3600, holder=name, tenants=tenants)
    wanted = {1: {"a": 12, "b": 6}, 3: {"a": 6, "b": 6, "c": 6}}[tenants]
    assert store.status().pinned == sum(wanted.values())


def test_a_pin_can_be_made_longer_however_much_it_keeps(open_store: Open) -> None:
    store = open_store(10 * CHARGE)
    keys = chain("a", 5)
    save(store, keys)
    for for_s in (0.5, 3600):
        store.pin(keys, for_s, holder="a")
    with store._catalog.transaction(reading=True) as catalog:
        ((for_s,),) = catalog.execute("SELECT until - ? FROM pins", (now_s(),))
    assert for_s > 3000


def test_a_conversation_is_pinned_as_it_grows(open_store: Open) -> None:
    """Each turn's prompt begins with those before it, whose chunks count once."""
    store = open_store(20 * CHARGE)
    keys = chain("a", 10)
    save(store, keys, tenant="a")
    for turn in range(1, 11):
        store.pin(keys[:turn], for_s=3600, holder="a")
    for key in singles("other", 30):
        save(store, [key], tenant="other")
    assert there(store, keys) == 10
    assert store.status().pinned == 1


def test_a_shorter_pin_does_not_end_a_longer_one(open_store: Open) -> None:
    store = open_store(20 * CHARGE)
    keys = chain("a", 3)
    save(store, keys, tenant="a")
    store.pin(keys[:2], for_s=3600, holder="a")
    store.pin(keys, for_s=60, holder="a")
    assert store.status().pinned == 2
