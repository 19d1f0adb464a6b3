# The check of oneDNN and native on a CPU:
#   docker build -f docker/cpu.Dockerfile -t pybnorm . && docker run --rm pybnorm
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir '/source[onednn,report]'
WORKDIR /reports
ENTRYPOINT ["pybnorm"]
CMD ["check"]
