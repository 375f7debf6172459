# A GPU image that runs the same commands as any other machine:
#
#   docker build -t mixtrain .
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/mixtrain/runs" -v "$PWD/cache:/mixtrain/cache" mixtrain
#   docker run --rm --gpus all --ipc=host mixtrain bash launch/test.sh
#
# The pinned PyTorch brings its own CUDA libraries; the toolkit of the base image serves TransformerEngine, whose PyTorch
# part is compiled here. Nobody has built this image yet: see CONTRIBUTING.md.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv g++ git ninja-build \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /mixtrain
# The dependencies first, so that a change of the code does not install them again.
COPY pyproject.toml ./
COPY launch/setup.sh launch/constraints.txt launch/
RUN bash launch/setup.sh python3.12 --extra dev
RUN .venv/bin/pip install --no-cache-dir ninja cmake pybind11 && bash launch/setup.sh --extra cuda --no-build-isolation
COPY . .

CMD ["bash", "launch/quickstart.sh"]
