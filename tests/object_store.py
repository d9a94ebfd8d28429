"""An object store on loopback: moto's S3 in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import httpx

SERVER = """
from moto.server import ThreadedMotoServer
import sys, time
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def object_store(bucket: str = "weights") -> Iterator[tuple[str, dict[str, str]]]:
    """URL of an empty bucket, and what clients need in their environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        deadline = time.monotonic() + 20
        while True:
            try:
                httpx.put(f"{address}/{bucket}", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # those of another server's address
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        yield f"s3://{bucket}", keys | {"AWS_ENDPOINT_URL": address}
    finally:
        process.kill()
        process.wait()
