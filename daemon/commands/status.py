"""`recapd status`: what runs, and how it is doing."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import sized, write_json
from recapd.protocol.client import Client, NotConnected
from recapd.protocol.messages import HealthResult, InfoResult


@click.command(cls=ClientCommand)
def command() -> None:
    """Say whether a daemon runs, and how it is doing. Starts none."""
    options = current_options()

    async def tell(client: Client) -> None:
        info, health = await client.call("server.info"), await client.call("server.health")
        if options.json:
            write_json(msgspec.json.encode({"running": True, "info": info, "health": health}))
            return
        for name, text in _lines(
            msgspec.json.decode(info, type=InfoResult),
            msgspec.json.decode(health, type=HealthResult),
        ):
            click.echo(f"{name:<12}{text}")

    try:
        run_client(tell, may_start=False)
    except NotConnected:
        if options.json:
            write_json(b'{"running":false}')
        raise


def _lines(info: InfoResult, health: HealthResult) -> list[tuple[str, str]]:
    server = info.server
    database, disk, queues = health.database, health.disk, health.queues
    return [
        (
            "daemon",
            f"{server.name} {server.version}, process {server.pid}, since {info.started_at}",
        ),
        ("store", server.store_id),
        ("health", "good" if health.ok else "see below"),
        ("database", f"{sized(database.bytes)}, log {sized(database.log_bytes)}"),
        ("disk", f"{sized(disk.free_bytes)} free"),
        ("sessions", f"{info.sessions_loaded} loaded"),
        ("connections", f"{info.connections}"),
        (
            "under way",
            f"{queues.waiting_changes} changes, {queues.running_compactions} compactions",
        ),
        ("longest stall", f"{health.event_loop.longest_stall_ms:.0f} ms"),
        *[("warning", f"{one.reason}: {one.hint}") for one in health.warnings],
    ]
