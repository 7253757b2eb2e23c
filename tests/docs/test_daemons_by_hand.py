"""Daemons that are started by the lines of docs/operate/{metrics,tls,watching}.md, on a network of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.own_root import run_as_root

(METRICS,) = (block.text for block in claimed(__file__, "docs/operate/metrics.md"))
(TLS,) = (block.text for block in claimed(__file__, "docs/operate/tls.md"))
(WATCHING,) = (block.text for block in claimed(__file__, "docs/operate/watching.md"))
pytestmark = pytest.mark.timeout(120)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
AWAIT = """
ready() { until grep -qs ^ready "$1"; do kill -0 $!; sleep 0.1; done; }
ended() { kill $(jobs -pr | tac); wait; }  # workers before the coordinator
cd "$OWN"
"""


@needs_curl
def test_metrics_are_served_where_the_page_says(tmp_path: Path) -> None:
    export, coordinator, worker = METRICS.splitlines()
    script = f"""
        {AWAIT}
        mkdir /etc/collectived; (umask 077; openssl rand -hex 32 > /etc/collectived/secret)
        {export}
        {coordinator} > first & ready first
        {worker} > second & ready second
        for port in 9450 9451; do
            curl -sf -H "authorization: Bearer $(cat $COLLECTIVED_SECRET_FILE)" http://host0:$port/metrics |
                grep ^collectived_build_info
        done
        ended
    """
    coordinator, worker = run_as_root(script, tmp_path, hosts="host0").splitlines()
    assert 'component="coordinator"' in coordinator and 'component="worker"' in worker


@needs_curl
def test_a_token_of_ones_own_opens_the_page(tmp_path: Path) -> None:
    secrets, coordinator, asks = WATCHING.splitlines()
    script = f"{AWAIT}\n{secrets}\n{coordinator} > first & ready first\n{asks}\nended"
    told = json.loads(run_as_root(script, tmp_path, hosts="train1"))
    assert told["workers"] == [] and told["coordinator"]["job"] == "default"


def test_a_certificate_lets_its_holder_look(tmp_path: Path) -> None:
    tls = "--tls-cert certs/node1/tls.crt --tls-key certs/node1/tls.key --tls-ca certs/node1/ca.crt"
    script = f"""
        {AWAIT}
        collectived certs init > made; collectived certs host node1 >> made; collectived certs client alice >> made
        collectived coordinator --listen unix:$OWN/c.sock > first & ready first
        collectived worker --coordinator unix:$OWN/c.sock --folder $OWN/s --listen node1:7451 {tls} > second &
        ready second
        {TLS}
        ended
    """
    said = run_as_root(script, tmp_path, hosts="node1")
    assert said.startswith("OK") and "1 worker on 1 host" in said
