# Two images from one file: `broker` has no torch, `train` has it and runs every other process.
#
#   docker build --target broker -t isles-broker .
#   docker build --target train -t isles-train --build-arg TORCH_SOURCE=... .
#
# TORCH_SOURCE is the Makefile's: the address of a package index that has CPU builds of torch, or a folder of wheels
# (`wheels` is the folder of that name beside this file; an absolute path is a folder of the base image). Without it
# pip's own settings decide, and a plain package index brings 5 GB of CUDA.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS python
ENV PATH=/srv/isles/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
STOPSIGNAL SIGTERM

# Requirements come first: they are installed again only when pyproject.toml or constraints.txt change.
FROM python AS build
WORKDIR /build
RUN python3 -m venv --without-pip /srv/isles
ENV INSTALL="pip --python /srv/isles/bin/python install --no-cache-dir -c constraints.txt"
COPY pyproject.toml constraints.txt wheels*/ ./wheels/
RUN mv wheels/pyproject.toml wheels/constraints.txt . \
 && python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['relay'], sep='\n', file=open('base.txt', 'w')); \
print(*p['optional-dependencies']['train'], sep='\n', file=open('train.txt', 'w'))" \
 && $INSTALL -r base.txt

FROM build AS build-broker
COPY . .
RUN $INSTALL --no-deps .

FROM build AS build-train
ARG TORCH_SOURCE=
RUN case "$TORCH_SOURCE" in \
      "") set -- ;; \
      *://*) set -- --extra-index-url "$TORCH_SOURCE" ;; \
      *) set -- --find-links "$TORCH_SOURCE" ;; \
    esac \
 && $INSTALL "$@" -r train.txt
COPY . .
RUN $INSTALL --no-deps .

FROM python AS process
RUN useradd --system --uid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin isles \
 && mkdir /data && chown isles:isles /data
USER isles
WORKDIR /data
ENTRYPOINT ["isles"]

FROM process AS broker
COPY --from=build-broker /srv/isles /srv/isles
# Port 7700 takes control messages, 7701 chunks, 7702 events.
EXPOSE 7700 7701 7702
HEALTHCHECK --interval=10s --timeout=30s --start-period=60s --retries=3 \
  CMD ["isles", "status", "--broker", "tcp://127.0.0.1:7700", "--timeout", "20", "--json"]
CMD ["broker"]

FROM process AS train
COPY --from=build-train /srv/isles /srv/isles
# A process that ended has ended its container, so what is left to notice is one that is stopped or a zombie.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["grep", "-q", "^State:.[RSD]", "/proc/1/status"]
CMD ["--help"]
