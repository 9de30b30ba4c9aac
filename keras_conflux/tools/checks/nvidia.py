"""The facts that nvidia-smi tells. No GPU is initialized."""

from keras_conflux._devices.driver import nvidia_smi


def gpus(*fields: str) -> list[list[str]]:
    """Returns fields of nvidia-smi of each GPU, as text, if it has a driver."""
    return _rows(f"--query-gpu={','.join(fields)}")


def processes() -> list[list[str]]:
    """Returns UUID of the GPU, id and name of each process that computes."""
    rows = _rows("--query-compute-apps=gpu_uuid,pid,process_name")
    return [[uuid, pid, ",".join(name)] for uuid, pid, *name in rows]


def topology() -> str:
    """Returns how the GPUs are connected, `""` if nobody tells."""
    table = nvidia_smi("topo", "-m")
    rows = [row.split() for row in table.splitlines() if row[:3] == "GPU"]
    links = {cell for row in rows for cell in row if cell.startswith("NV")}
    return ", ".join(sorted(links)) or ("no NVLink" if len(rows) > 1 else "")


def _rows(query: str) -> list[list[str]]:
    lines = nvidia_smi(query, "--format=csv,noheader").splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines]
