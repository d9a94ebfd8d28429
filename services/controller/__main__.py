"""`python -m services.controller`: the HTTP API and the threads that run jobs."""

from __future__ import annotations

import argparse
import gc
import signal
import sys

from shared import logs
from shared.agent.process import guard_parent, take_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    guard_parent()
    take_turns()
    logs.begin("controller")

    import uvicorn

    from services.controller.api.app import make_app
    from services.controller.mesh import Mesh
    from shared.config.settings import from_environment
    from shared.http.guard import check_listening
    from shared.wire.client import RedisUnfit, check_server, connect

    settings = from_environment()
    try:
        check_listening(args.host, settings)
        check_server(connect(settings.redis_url))
    except (RedisUnfit, ValueError) as error:
        raise SystemExit(str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn drains, and then raises the signal again
    gc.collect()
    gc.freeze()  # what the libraries are made of is not walked again while requests wait
    app = make_app(settings, lambda: Mesh(lambda: connect(settings.redis_url), settings))
    uvicorn.run(app, host=args.host, port=args.port, log_config=None, access_log=False, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
