"""Settings: bad ones are named with what is allowed, and they come back from disk as they were."""

import copy
import inspect
import json
import pickle
from dataclasses import fields

import pytest
from peft import PeftConfig, PeftType

from hf_poetx import PoetXConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": 1}, r"block=1: .*>= 2"),
        ({"block": 0}, r"block=0: "),
        ({"block": 2.5}, r"block=2.5: "),
        ({"block": True}, r"block=True: "),
        ({"merge_interval": -1}, r"merge_interval=-1: .*0 to never merge"),
        ({"merge_interval": None}, r"merge_interval=None: "),
        ({"clip_warmup": -3}, r"clip_warmup=-3: "),
        ({"permutation_group": 0}, r"permutation_group=0: "),
        ({"seed": -1}, r"seed=-1: "),
        ({"seed": 2**63}, r"seed=9223372036854775808: .*below"),
        ({"init": "normal"}, r"init='normal': use one of 'keep', 'normalize'"),
        ({"memory_mode": "slow"}, r"memory_mode='slow': use one of 'fast', 'mem'"),
        ({"skew_dtype": "float64"}, r"skew_dtype='float64': use one of "),
        ({"base_error_bits": 16}, r"base_error_bits=16: use one of 0, 8"),
        ({"train_rest": "yes"}, r"train_rest='yes': use one of False, True"),
        ({"poet_scale": 0}, r"poet_scale=0: .*> 0"),
        ({"poet_scale": float("nan")}, r"poet_scale=nan: "),
        ({"poet_scale": float("inf")}, r"poet_scale=inf: "),
        ({"poet_scale": "half"}, r"poet_scale='half': "),
        ({"poet_scale": True}, r"poet_scale=True: "),
        ({"target_modules": 3}, r"target_modules=3: use a list of module names"),
        ({"target_modules": [3]}, r"target_modules=\[3\]: use a list of module names"),
        ({"exclude_modules": 4}, r"exclude_modules=4: use a list of module names"),
        ({"modules_to_save": "lm_head"}, r"modules_to_save='lm_head': use a list of module names"),
        ({"layers_to_transform": "0"}, r"layers_to_transform='0': use the index of a layer"),
        ({"layers_to_transform": [0], "layers_pattern": 1}, r"layers_pattern=1: use the name"),
        ({"base_config": "x"}, r"base_config='x': use a dictionary"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, r"layers_to_transform needs .* a list of names"),
        ({"target_modules": ["q_proj"], "layers_pattern": "h"}, r"layers_pattern='h' needs layers_to_transform"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_named_with_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        PoetXConfig(**settings)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("blok", "block"), ("block_size", "block"), ("merge_intervall", "merge_interval"), ("seeds", "seed")],
)
def test_an_unknown_field_names_the_closest_one(wrong, meant):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'") as raised:
        PoetXConfig(**{wrong: 3})
    assert f"did you mean '{meant}'?" in str(raised.value)


def test_a_field_like_no_other_lists_them_all():
    with pytest.raises(TypeError, match=r"the fields are .*block.*merge_interval"):
        PoetXConfig(zzzz=1)


def test_signature_shows_the_fields():
    assert set(inspect.signature(PoetXConfig).parameters) == {f.name for f in fields(PoetXConfig) if f.init}


def test_every_own_field_describes_itself():
    inherited = {f.name for f in fields(PeftConfig)}
    assert all(f.metadata.get("help") for f in fields(PoetXConfig) if f.name not in inherited)


def test_config_comes_back_from_disk_as_it_was(tmp_path):
    config = PoetXConfig(
        block=64,
        target_modules=["b", "a"],
        exclude_modules=["c"],
        layers_to_transform=[1, 2],
        merge_interval=7,
        init="normalize",
        train_rest=True,
        seed=3,
        task_type="CAUSAL_LM",
    )
    config.save_pretrained(tmp_path)
    for loader in (PoetXConfig, PeftConfig):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is PoetXConfig and loaded.peft_type is PeftType.POETX
        assert loaded.to_dict() == config.to_dict()


def test_files_of_the_same_config_are_the_same_in_every_process(tmp_path):
    names = {f"layer_{index}" for index in range(30)}
    PoetXConfig(target_modules=names).save_pretrained(tmp_path)
    # The order of a set differs from process to process.
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(names)


def test_a_file_of_a_newer_version_loads_without_what_is_unknown(tmp_path):
    PoetXConfig(block=8).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_later_field": 1}))
    with pytest.warns(UserWarning, match="a_later_field"):
        assert PoetXConfig.from_pretrained(tmp_path).block == 8


def test_a_pickled_peft_type_imports_this_package_where_it_is_unpickled():
    pickled = pickle.dumps(PeftType.POETX)
    assert b"hf_poetx" in pickled and pickle.loads(pickled) is PeftType.POETX


def test_peft_type_is_looked_up_by_value_name_and_attribute():
    assert PeftType("POETX") is PeftType["POETX"] is PeftType.POETX
    assert PeftType.POETX in list(PeftType) and hash(PeftType.POETX) == hash("POETX")
    assert copy.deepcopy(PeftType.POETX) is PeftType.POETX and json.dumps(PeftType.POETX) == '"POETX"'
