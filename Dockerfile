# Two stages on the same base. Users: `docker build .`. Offline (as CI does): put wheels for the base's Python into
# wheels/ (`pip wheel -w wheels .`), and nothing is fetched; BASE may be any image with Python 3.11 or later and venv.
ARG BASE=docker.io/library/python:3.12-slim

# hadolint ignore=DL3006
FROM ${BASE} AS build
# Extras to install, e.g. `amd` or `amd,nvidia`; empty: none.
ARG EXTRAS=""
# The whole context: .dockerignore lets through what a build needs and nothing else.
COPY . /src
WORKDIR /src
# Without pip in the end: 10 MB that nothing uses and scanners complain about.
RUN set -eu; \
    python3 -m venv /opt/fragscope; \
    extras="${EXTRAS:+[$EXTRAS]}"; \
    if [ -d wheels ]; then set -- --no-index --find-links wheels "fragscope$extras"; else set -- ".$extras"; fi; \
    /opt/fragscope/bin/python -m pip install --no-cache-dir --no-compile --disable-pip-version-check "$@"; \
    /opt/fragscope/bin/python -m pip uninstall -q -y setuptools pip
# Bytecode of what runs, the standard library's too (slim images ship none): without it each start on a read-only root
# compiles 190 modules, 0.4 s of CPU, which is 8 s at 50m. The demo run fills it and is the smoke test.
ENV PYTHONPYCACHEPREFIX=/opt/fragscope/pycache
RUN /opt/fragscope/bin/python -m compileall -q -x 'pygments/(lexers|styles)' /opt/fragscope/lib && \
    /opt/fragscope/bin/fragscope demo --scenario healthy --duration 2s --web.listen-address 127.0.0.1:0 && \
    /opt/fragscope/bin/python -c "import urllib.request"
# Made empty, so that a named volume mounted there belongs to the user who writes it.
WORKDIR /state

# hadolint ignore=DL3006
FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=""
ARG SOURCE="https://github.com/fragscope/fragscope"
LABEL org.opencontainers.image.title="fragscope" \
      org.opencontainers.image.description="Names the cause when vLLM on AMD Instinct fails although memory looks free" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
COPY --from=build /opt/fragscope /opt/fragscope
COPY --from=build --chown=65532:65532 /state /var/lib/fragscope
ENV PYTHONPYCACHEPREFIX=/opt/fragscope/pycache \
    FRAGSCOPE_REVISION="${REVISION}" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 23724
# For Docker and Podman; Kubernetes ignores it and asks the probes of deploy/kubernetes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/opt/fragscope/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:23724/-/healthy', timeout=4)"]
ENTRYPOINT ["/opt/fragscope/bin/fragscope"]
CMD ["serve"]
