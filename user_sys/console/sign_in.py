"""The routes by which people with accounts sign in and out."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from hal.decode_errors import DECODE_ERRORS
from hal.state_database import AuditEntry, AuditSink
from user_sys.console.access import SIGN_IN_PATH, SIGN_OUT_PATH, AccountAccess, headers_of
from user_sys.console.accounts import MAX_PASSWORD_CHARS
from user_sys.errors import AccountError


class SignInRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person enters."""

    name: str
    password: str


def sign_in_routes(access: AccountAccess, audit: AuditSink, page: Path) -> APIRouter:
    """The sign-in page, and the orders to sign in and out."""
    router = APIRouter()

    @router.get(SIGN_IN_PATH)
    async def show() -> FileResponse:
        return FileResponse(page)

    @router.post(SIGN_IN_PATH)
    async def sign_in(request: Request) -> Response:
        address = request.client.host if request.client else ""
        try:
            entered = msgspec.json.decode(await request.body(), type=SignInRequest)
        except DECODE_ERRORS:
            return Response("name and password are missing\n", 400)
        person = entered.name[:64]
        try:
            cookie = await run_in_threadpool(access.sign_in, person, entered.password[:MAX_PASSWORD_CHARS], address)
        except AccountError as error:
            audit(AuditEntry(event="sign-in", person=person, address=address, outcome=str(error)))
            return Response(f"{error}\n", 401)
        audit(AuditEntry(event="sign-in", person=person, address=address, outcome="done"))
        return Response(headers={"set-cookie": cookie})

    @router.post(SIGN_OUT_PATH)
    async def sign_out(request: Request) -> Response:
        return Response(headers={"set-cookie": await run_in_threadpool(access.sign_out, headers_of(request.scope))})

    return router
