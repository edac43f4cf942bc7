"""Declarations for the tools of AgentDojo's suites, as an operator would derive them from their descriptions."""

from halter.core.provenance import ArgumentUse, Declaration, Reach, Reads

MAIL_WORDS = ("email", "mail", "send", "forward", "reply")
EVENT_WORDS = ("create event", "add event", "event calendar", "add reminder", "remind calendar", "schedule")


def _uses(roles: str) -> dict[str, ArgumentUse]:
    """Parse `to=destination:address body=content` into uses of arguments."""
    uses: dict[str, ArgumentUse] = {}
    for entry in roles.split():
        name, _, use = entry.partition("=")
        role, _, kind = use.partition(":")
        uses[name] = ArgumentUse(role, kind)  # type: ignore[arg-type]
    return uses


def _pairs(fields: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in fields.split())


def _read(reads: Reads, roles: str = "", *, mints: str = "", lists: str = "") -> Declaration:
    return Declaration(reads=reads, reach="none", arguments=_uses(roles), mints=_pairs(mints), lists=_pairs(lists))


def _write(reach: Reach, roles: str, *asks: str, mints: str = "", alone: Reach | None = None) -> Declaration:
    uses = _uses(roles)
    return Declaration(reads="nothing", reach=reach, arguments=uses, mints=_pairs(mints), asks=asks, alone=alone)


CALENDAR = {
    "create_calendar_event": _write(
        "others",
        "title=content start_time=detail end_time=detail description=content participants=destination:address "
        "location=content",
        *EVENT_WORDS,
        alone="own",
    ),
    "search_calendar_events": _read("own", mints="id_=event participants=address"),
    "get_day_calendar_events": _read("own", mints="id_=event participants=address"),
    "cancel_calendar_event": _write("final", "event_id=target:event", "cancel", "delete event", "remove event"),
}
MAIL = {
    "send_email": _write(
        "others",
        "recipients=destination:address subject=content body=content attachments=content "
        "attachments.type=detail:choice attachments.file_id=target:file cc=destination:address bcc=destination:address",
        *MAIL_WORDS,
    )
}
WORKSPACE = {
    **CALENDAR,
    **MAIL,
    "delete_email": _write("final", "email_id=target:email", "delete email", "delete mail"),
    "get_unread_emails": _read("anyone"),
    "get_sent_emails": _read("own"),
    "get_received_emails": _read("anyone"),
    "get_draft_emails": _read("own"),
    "search_emails": _read("anyone"),
    "search_contacts_by_name": _read("trusted", mints="email=address"),
    "search_contacts_by_email": _read("trusted", mints="email=address"),
    "get_current_day": _read("trusted"),
    "reschedule_calendar_event": _write(
        "own", "event_id=target:event new_start_time=detail new_end_time=detail", "reschedule", "move", "postpone"
    ),
    "add_calendar_event_participants": _write(
        "others", "event_id=target:event participants=destination:address", "invite", "add participants", "add event"
    ),
    "append_to_file": _write("own", "file_id=target:file content=content", "add file", "append", "write", "add list"),
    "search_files_by_filename": _read("own", mints="id_=file"),
    "create_file": _write(
        "own", "filename=detail content=content", "create file", "new file", "save", mints="id_=file"
    ),
    "delete_file": _write("final", "file_id=target:file", "delete file", "remove file"),
    "get_file_by_id": _read("own", mints="id_=file"),
    "list_files": _read("own", mints="id_=file"),
    "share_file": _write(
        "others", "file_id=target:file email=destination:address permission=detail:choice", "share", "give access"
    ),
    "search_files": _read("own", mints="id_=file"),
}
TRAVEL = {
    **CALENDAR,
    **MAIL,
    "get_user_information": _read("own"),
    "get_all_hotels_in_city": _read("trusted", mints="*=hotel"),
    "get_hotels_prices": _read("trusted"),
    "get_rating_reviews_for_hotels": _read("anyone"),
    "get_hotels_address": _read("trusted"),
    "get_all_restaurants_in_city": _read("trusted", mints="*=restaurant"),
    "get_cuisine_type_for_restaurants": _read("trusted"),
    "get_restaurants_address": _read("trusted"),
    "get_rating_reviews_for_restaurants": _read("anyone"),
    "get_dietary_restrictions_for_all_restaurants": _read("trusted"),
    "get_contact_information_for_restaurants": _read("trusted"),
    "get_price_for_restaurants": _read("trusted"),
    "check_restaurant_opening_hours": _read("trusted"),
    "get_all_car_rental_companies_in_city": _read("trusted", mints="*=company"),
    "get_car_types_available": _read("trusted"),
    "get_rating_reviews_for_car_rental": _read("anyone"),
    "get_car_fuel_options": _read("trusted"),
    "get_car_rental_address": _read("trusted"),
    "get_car_price_per_day": _read("trusted"),
    "get_flight_information": _read("trusted"),
    "reserve_hotel": _write("final", "hotel=target:hotel start_day=detail end_day=detail", "reserve", "reservation"),
    "reserve_car_rental": _write(
        "final", "company=target:company start_time=detail end_time=detail", "reserve car", "reservation car"
    ),
    "reserve_restaurant": _write(
        "final", "restaurant=target:restaurant start_time=detail", "reserve restaurant", "reservation restaurant"
    ),
}
PAYMENT = "recipient=destination:account amount=amount subject=content date=detail recurring=detail"
BANKING = {
    "get_iban": _read("trusted"),
    "send_money": _write("final", PAYMENT, "pay", "send", "refund", "transfer"),
    "schedule_transaction": _write("final", PAYMENT, "schedule", "standing", "recurring", "set up"),
    "update_scheduled_transaction": _write(
        "final", f"id=target:payment {PAYMENT}", "update payment", "adjust payment", "update orders", "change payment"
    ),
    "get_balance": _read("trusted"),
    "get_most_recent_transactions": _read("anyone"),
    "get_scheduled_transactions": _read("trusted", mints="id=payment recipient=account"),
    "read_file": _read("anyone"),
    "get_user_info": _read("own"),
    "update_password": _write("final", "password=target:secret", "update password", "change password"),
    "update_user_info": _write(
        "own",
        "first_name=target street=target city=target last_name=target",
        "update information",
        "update address",
        "change address",
    ),
}
SLACK = {
    "get_channels": _read("known", lists="*=channel"),
    "add_user_to_channel": _write("others", "user=target:user channel=destination:channel", "add"),
    "read_channel_messages": _read("known", lists="sender=user"),
    "read_inbox": _read("known", lists="sender=user"),
    "send_direct_message": _write(
        "others", "recipient=destination:user body=content", "send", "message", "write", "reply", "tell"
    ),
    "send_channel_message": _write(
        "others", "channel=destination:channel body=content", "post", "send", "write", "reply", "message"
    ),
    "get_users_in_channel": _read("known", lists="*=user"),
    "invite_user_to_slack": _write("final", "user=target:user user_email=destination:address", "invite"),
    "remove_user_from_slack": _write("final", "user=target:user", "remove"),
    "get_webpage": _read("anyone", "url=destination:url"),
    "post_webpage": _write("others", "url=destination:url content=content", "post", "publish"),
}
SUITES = {"workspace": WORKSPACE, "travel": TRAVEL, "banking": BANKING, "slack": SLACK}
