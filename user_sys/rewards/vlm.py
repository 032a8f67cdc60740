"""Progress and success by a vision-language model behind OpenAI's chat completions, as vLLM and llama.cpp have them.

One request shows pictures of an episode in order, with its sentence (after Ma et al., "Vision Language Models are
In-Context Value Learners", arXiv 2411.04549, without shuffled pictures and examples).
"""

from __future__ import annotations

import base64
import os
import re
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError

import msgspec
import numpy as np
from msgspec import Meta

from hal.decode_errors import DECODE_ERRORS
from user_sys.errors import ConfigError, DataSetError, LinkDown
from user_sys.interchange.episodes import StoredEpisode
from user_sys.interchange.frames import encode_jpeg
from user_sys.rewards.reward import EpisodeReward, Reward, cameras_of, clip_pictures, side_by_side

MAX_ANSWER_BYTES = 1 << 20
REFUSED = (400, 413, 422)  # HTTP statuses of a request that the server will refuse again
PROMPT = (
    'The {count} pictures show a robot in order of time. Its task: "{sentence}". Answer with JSON only: {{"progress": '
    '[{count} numbers, the progress at each picture, 0 none to 1 done], "success": true if the last one shows it done}}'
)


class _RefusedRedirects(urllib.request.HTTPRedirectHandler):
    """Fails at a redirect: urllib would send the key to the other server."""

    def redirect_request(self, request: Any, file: Any, code: int, message: str, headers: Any, url: str) -> None:
        raise HTTPError(request.full_url, code, f"{message}: it redirects to {url}; set url to that", headers, file)


_OPENER = urllib.request.build_opener(_RefusedRedirects)


class Judgement(msgspec.Struct, frozen=True):
    """The model's answer."""

    progress: list[float]
    success: bool


@dataclass(frozen=True)
class VlmSettings:
    """Settings of an external vision-language model.

    Attributes:
        url: of its chat completions.
        model: its name there.
        key_variable: the environment variable that has the server's key; empty for a server without keys.
        cameras: to show, side by side; empty for all.
        pictures: of an episode to show, evenly spaced.
        timeout_s: of an answer.
    """

    url: str = "http://127.0.0.1:8000/v1/chat/completions"
    model: str = "default"
    key_variable: str = ""
    cameras: tuple[str, ...] = ()
    pictures: Annotated[int, Meta(ge=2, le=64)] = 8
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0


class VlmReward(Reward):
    """See the module. A step's reward is the progress that it adds, and 1 more at the end of a success."""

    settings = VlmSettings
    is_dense = True

    def __init__(self, settings: VlmSettings) -> None:
        self._settings = settings
        self._headers = {"Content-Type": "application/json"}
        if not settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"rewards.options.url is {settings.url!r}; it begins with http:// or https://")
        if variable := settings.key_variable:
            if not (key := os.environ.get(variable)):
                raise ConfigError(f"rewards.options.key_variable: the environment has no {variable}; set it to the key")
            self._headers["Authorization"] = f"Bearer {key}"

    def evaluate(self, episode: StoredEpisode) -> EpisodeReward:
        """See `Reward.evaluate`.

        Raises:
            DataSetError: also if the server refuses the request, such as for its size.
            LinkDown: the server gives no answer; try again later.
        """
        cameras = self._settings.cameras or cameras_of(episode)
        places = np.unique(np.linspace(0, episode.steps, self._settings.pictures).round().astype(int))
        text = PROMPT.format(count=len(places), sentence=episode.header.sentence or episode.header.task)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for pictures in clip_pictures(episode, cameras, places.tolist()):
            address = f"data:image/jpeg;base64,{base64.b64encode(encode_jpeg(side_by_side(pictures))).decode()}"
            content.append({"type": "image_url", "image_url": {"url": address}})
        found = self._ask(content, episode.header.episode)
        if len(found.progress) != len(places):
            raise DataSetError(f"{episode.header.episode}: {len(found.progress)} values for {len(places)} pictures")
        progress = np.interp(np.arange(episode.steps + 1), places, np.clip(found.progress, 0, 1)).astype(np.float32)
        last = np.arange(episode.steps) == episode.steps - 1
        return EpisodeReward(found.success, np.diff(progress) + np.float32(found.success) * last, progress=progress)

    def _ask(self, content: list[dict[str, Any]], episode: str) -> Judgement:
        body = {"model": self._settings.model, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        request = urllib.request.Request(self._settings.url, msgspec.json.encode(body), self._headers)
        try:
            with _OPENER.open(request, timeout=self._settings.timeout_s) as response:
                answer = response.read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException) as error:
            if isinstance(error, HTTPError) and error.code in REFUSED:
                how = "see the server's log, or set fewer rewards.options.pictures"
                raise DataSetError(f"{episode}: {self._settings.url} refuses its request: {error}; {how}") from None
            raise LinkDown(f"{self._settings.url} gives no answer: {error}; start the model's server") from None
        try:
            text = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
            return msgspec.json.decode(re.search(r"\{.*\}", text, re.DOTALL)[0], type=Judgement)  # type: ignore[index]
        except (*DECODE_ERRORS, LookupError, TypeError) as error:
            raise DataSetError(f"{episode}: the model's answer cannot be read: {error}") from None
