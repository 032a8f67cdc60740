"""Tiny policies of LeRobot, made on the spot: as options of the policy `lerobot`, and as checkpoints in a folder."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.spec import RobotSpec
from user_sys.policies.lerobot import LeRobotNetwork, LeRobotPolicy
from user_sys.policies.lerobot_checkpoint import LeRobotSettings

ACT: dict[str, Any] = dict(
    chunk_size=4,
    n_action_steps=3,
    dim_model=32,
    n_heads=2,
    dim_feedforward=32,
    n_encoder_layers=1,
    n_vae_encoder_layers=1,
    latent_dim=4,
    pretrained_backbone_weights=None,
)
DIFFUSION: dict[str, Any] = dict(
    horizon=8,
    n_action_steps=4,
    down_dims=[16, 32],
    n_groups=4,
    diffusion_step_embed_dim=16,
    spatial_softmax_num_keypoints=4,
    num_train_timesteps=10,
    prediction_type="sample",  # new weights do not saturate then
    crop_shape=None,
    pretrained_backbone_weights=None,
    use_group_norm=True,
    resize_shape=[64, 64],  # of smaller pictures no place is left after the encoder
)
SMOLVLA: dict[str, Any] = dict(
    chunk_size=4,
    n_action_steps=4,
    max_state_dim=8,
    max_action_dim=6,
    resize_imgs_with_padding=[32, 32],
    tokenizer_max_length=8,
    num_vlm_layers=2,
    num_steps=3,
    optimizer_lr=1e-3,
)
WORDS = "lift reach the cube green target touch to a".split()


def small_settings(kind: str, folder: Path, **options: Any) -> LeRobotSettings:
    """Settings of a new tiny policy; `folder` gets the parts that LeRobot loads by name."""
    config = {"act": ACT, "diffusion": DIFFUSION, "smolvla": SMOLVLA}[kind]
    if kind == "smolvla":
        config = config | {"vlm_model_name": str(make_vlm(folder / "vlm"))}
    return LeRobotSettings(type=kind, config=config, **options)  # type: ignore[arg-type]  # one of the types


def make_checkpoint(kind: str, spec: RobotSpec, folder: Path, seed: int = 0, **options: Any) -> LeRobotSettings:
    """Saves a new tiny policy for `spec` as LeRobot does; returns settings that load it."""
    torch.manual_seed(seed)
    module = LeRobotPolicy.make_module(spec, settings=small_settings(kind, folder, **options))
    assert isinstance(module, LeRobotNetwork)
    module.export(folder / kind)
    return LeRobotSettings(path=folder / kind)


def edit_config(settings: LeRobotSettings, **changes: Any) -> None:
    """Changes fields of a checkpoint's ``config.json``."""
    assert settings.path is not None
    path = settings.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "\n", "<fake_token_around_image>", "<image>", "<global-img>"]
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(special + WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("fake_image_token", "image_token", "global_image_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=dict(zip(names, special[3:], strict=True)),
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_vlm(folder: Path) -> Path:
    """Configuration, tokenizer and picture processor of a tiny SmolVLM."""
    if folder.exists():
        return folder
    from transformers import (
        AutoTokenizer,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(folder))
    text = dict(
        model_type="llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        max_position_embeddings=128,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=image_token, pad_token_id=0
    ).save_pretrained(folder)
    size = {"longest_edge": 32}
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size=size, max_image_size=size),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=4,
    ).save_pretrained(folder)
    return folder


def make_pi(kind: str, spec: RobotSpec, folder: Path, patch: pytest.MonkeyPatch) -> LeRobotSettings:
    """Saves a pi0 or pi05 of few layers, whose sizes LeRobot has as constants; from then on they are small."""
    from lerobot.processor import tokenizer_processor

    modeling = import_module(f"lerobot.policies.{kind}.modeling_{kind}")

    def small_paligemma() -> Any:
        vision = dict(model_type="siglip_vision_model", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        return mapping["paligemma"](vision_config=vision | {"patch_size": 8, "vision_use_head": False})

    def small_model(config: Any) -> Any:
        config.vision_config.projection_dim = 16
        return paligemma(config=config)

    mapping = modeling.CONFIG_MAPPING
    paligemma = modeling.PaliGemmaForConditionalGenerationWithPiGemma
    small = modeling.GemmaConfig(width=16, depth=1, mlp_dim=32, num_heads=8, num_kv_heads=1, head_dim=8)
    patch.setattr(modeling, "CONFIG_MAPPING", {"paligemma": small_paligemma, "gemma": mapping["gemma"]})
    patch.setattr(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", small_model)
    patch.setattr(modeling, "get_gemma_config", lambda variant: small)
    words = make_tokenizer(folder / "words")
    load = tokenizer_processor.AutoTokenizer.from_pretrained
    with patch.context() as only_here:  # LeRobot has the name of the tokenizer as a constant
        only_here.setattr(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda name: load(str(words)))
        config = dict(chunk_size=4, n_action_steps=4, max_state_dim=8, max_action_dim=6, image_resolution=[32, 32])
        config |= dict(num_inference_steps=3, tokenizer_max_length=24)
        torch.manual_seed(0)
        settings = LeRobotSettings(type=kind, config=config, cameras=("front",))  # type: ignore[arg-type]  # one of both
        module = LeRobotPolicy.make_module(spec, settings=settings)
        assert isinstance(module, LeRobotNetwork)
        module.export(folder / kind)
    processor = folder / kind / "policy_preprocessor.json"
    processor.write_text(processor.read_text().replace("google/paligemma-3b-pt-224", str(words)))
    return LeRobotSettings(path=folder / kind)
