"""Programs by what they are: those that only look, those that run code, those that fetch, those that destroy."""

import re
from posixpath import basename
from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHELLS: Final = _names("sh bash zsh dash ksh mksh pdksh fish ash yash tcsh csh rbash rzsh lksh osh nu elvish xonsh")

FETCHERS: Final = _names(
    "curl wget fetch http https httpie xh aria2c axel lynx w3m links elinks ftp lftp sftp scp nc ncat netcat socat "
    "telnet tftp hget GET"
)

RAISING: Final = _names("sudo doas su pkexec runuser sudoedit run0 gosu setpriv")

READERS: Final = _names(
    "ls dir vdir cat tac bat batcat grep egrep fgrep zgrep rg ag ack head tail wc echo printf pwd whoami id groups "
    "users who w last date diff colordiff diff3 sdiff cmp sort uniq cut tr stat file du df ps pgrep pstree top htop "
    "which type whereis test [ [[ true false : jq basename dirname realpath readlink tree less more most zless zcat "
    "bzcat xzcat md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum sum sleep wait uname arch nproc "
    "hostname hostnamectl cd pushd popd dirs seq shuf column nl od xxd hexdump strings uptime free vmstat iostat "
    "printenv yes expr comm join paste fold fmt pr rev expand unexpand tsort factor numfmt man info apropos whatis "
    "help command tldr cal ncal locale getconf getent lscpu lsblk lsusb lspci lsmod lsof netstat ss dig nslookup host "
    "ping ping6 traceroute tracepath mtr base64 base32 basenc cloc tokei scc diffstat exa eza lsd look iconv tput bc "
    "clear reset tty stty logname pathchk jobs fg bg disown hash shopt set unset export local declare typeset readonly "
    "read mapfile readarray let return exit break continue shift getopts umask ulimit times logout for case select in "
    "function esac xmllint xmlstarlet readelf objdump nm ldd size md5 shasum zipinfo ncdu pdftotext exiftool identify "
    "pylint flake8 mypy pyright basedpyright shellcheck hadolint yamllint sw_vers lsb_release dmidecode acpi sensors "
    "aspell hunspell env history uuidgen mktemp zdiff zcmp smartctl blkid lshw"
)
"""They write nothing and run nothing, unless an option of theirs says so."""

DESTROYERS: Final = _names(
    "rm rmdir unlink shred srm wipe chmod chown chgrp chattr setfacl mv dd truncate mkswap wipefs fdisk sfdisk cfdisk "
    "gdisk sgdisk parted cryptsetup lvremove vgremove pvremove zpool zfs blkdiscard mdadm shutdown reboot poweroff "
    "halt init telinit kexec kill pkill killall find git docker podman kubectl terraform tofu aws psql mysql mariadb "
    "sqlite3 redis-cli mongo mongosh dropdb dropuser systemctl crontab rsync tee cp ln install sed awk gawk mawk perl "
    "curl wget userdel groupdel usermod passwd iptables nft ufw mount umount halter tar busybox toybox"
)
"""Names that make a line dangerous when a program that is not known is given them to run."""

_PYTHON: Final = re.compile(r"(?:python|pypy|pythonw|ipython|micropython|jython|bpython)[\d.]*[a-z]*(?:-\w+)?")
_NUMBERED: Final = re.compile(r"(perl|ruby|node|nodejs|php|lua|luajit|tclsh|guile|deno|bun|julia|Rscript)[\d.-]*")


def program_of(word: str) -> str:
    """Name a program without the folder it lies in."""
    return word if "$(" in word or "`" in word else basename(word.replace("\\", "/"))


def family_of(program: str) -> str:
    """Name an interpreter without its version: `python` for `python3.11`."""
    if _PYTHON.fullmatch(program):
        return "python"
    found = _NUMBERED.fullmatch(program)
    return found[1] if found else program
