-- Looking back at halts by time: every cancelled session leaves one.

CREATE INDEX halts_at ON halts (at);
