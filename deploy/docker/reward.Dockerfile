# The reward service. `make images` builds it,
# from build/wheelhouse/reward, which `make wheelhouse` fills from the locks.
# BASE_IMAGE: any image with Python 3.11 as python3 (and venv).
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS packages
RUN python3 -m venv /opt/unimesh
COPY wheels/ /wheels/
RUN /opt/unimesh/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM ${BASE_IMAGE}
RUN useradd --uid 1000 --create-home unimesh && mkdir -p /state /bodies /models && chown unimesh: /state /bodies
COPY --from=packages /opt/unimesh /opt/unimesh
COPY project/ /tmp/project/
RUN /opt/unimesh/bin/pip install --no-cache-dir --no-index --no-deps /tmp/project/*.whl
ENV PATH=/opt/unimesh/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    UNIMESH_STATE=/state \
    UNIMESH_BODIES=dir:/bodies \
    UNIMESH_ROOTS=/models \
    UNIMESH_HEALTH=127.0.0.1:8090 \
    OPENBLAS_NUM_THREADS=1
USER unimesh
WORKDIR /state
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import *; build_opener(ProxyHandler({})).open('http://127.0.0.1:8090/healthz', timeout=4)"]
ENTRYPOINT ["unimesh", "serve"]
CMD ["reward"]
