// A library to load in front of the C library (LD_PRELOAD): chosen calls fail, as on a file system that has trouble.
//
// The environment says which, and is read at each call, so that a process can begin and end its own trouble:
//     FAIL_CALLS   names of calls with commas, such as open,read,fsync; without it nothing fails
//     FAIL_ERRNO   the number of the error
//     FAIL_PATH    only paths that contain this text
//     FAIL_NOT     no path that contains this text
//     FAIL_FROM    the first of these calls that fails, counted from 1 (1 by default)
//     FAIL_COUNT   so many calls fail (0, the default: all from then on)
//     FAIL_KILL    1: the process is killed there, in place of an error
//     FAIL_SHORT   1: a read says that the file has ended, in place of an error
//     FAIL_LOG     a file that gets a line for each call that failed
// One name stands for all forms of a call: open for openat, open64, creat, fopen; stat for lstat, fstat, statx, access.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATH 8192
static atomic_int seen;
static char last[512];  // the FAIL_ variables of the last call: where they change, the count begins again

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : NULL;
}

static long number(const char *name, long otherwise) {
  const char *value = setting(name);
  return value ? atol(value) : otherwise;
}

static int listed(const char *call) {
  const char *names = setting("FAIL_CALLS");
  size_t length = strlen(call);
  while (names && *names) {
    size_t word = strcspn(names, ",");
    if (word == length && !strncmp(names, call, word)) return 1;
    names += word + (names[word] == ',');
  }
  return 0;
}

static int fails(const char *call, const char *path) {
  if (!setting("FAIL_CALLS") || !listed(call)) return 0;
  const char *wanted = setting("FAIL_PATH"), *other = setting("FAIL_NOT");
  if ((wanted && (!path || !strstr(path, wanted))) || (other && path && strstr(path, other))) return 0;
  char now[512];
  snprintf(now, sizeof now, "%s %ld %ld %ld %s", setting("FAIL_CALLS"), number("FAIL_ERRNO", 0), number("FAIL_FROM", 1),
           number("FAIL_COUNT", 0), wanted ? wanted : "");
  if (strcmp(now, last)) {
    strcpy(last, now);
    seen = 0;
  }
  long turn = atomic_fetch_add(&seen, 1) + 1, from = number("FAIL_FROM", 1), count = number("FAIL_COUNT", 0);
  if (turn < from || (count && turn >= from + count)) return 0;
  const char *log = setting("FAIL_LOG");
  if (log) {
    char line[PATH + 64];
    int size = snprintf(line, sizeof line, "%s %s\n", call, path ? path : "-");
    int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file >= 0) {
      syscall(SYS_write, file, line, size);
      syscall(SYS_close, file);
    }
  }
  if (number("FAIL_KILL", 0)) kill(getpid(), SIGKILL);
  errno = number("FAIL_ERRNO", EIO);
  return 1;
}

static const char *of_file(int file, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, buffer, PATH - 1);
  buffer[size > 0 ? size : 0] = 0;
  return buffer;
}

static const char *below(int folder, const char *path, char *buffer) {
  if (!path || *path == '/' || folder == AT_FDCWD) return path;
  of_file(folder, buffer);
  size_t size = strlen(buffer);
  snprintf(buffer + size, PATH - size, "/%s", path);
  return buffer;
}

// The real call, with the type of this one.
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// A call on a path: its result, name, parameters, what is passed on, the word for it, the path, and what says that it failed.
#define CALL(result, name, parameters, arguments, word, path, failed) \
  result name parameters {                                            \
    char buffer[PATH];                                                \
    (void)buffer;                                                     \
    if (setting("FAIL_CALLS") && fails(word, path)) return failed;    \
    return REAL(name) arguments;                                      \
  }
#define FILE_OF(file) of_file(file, buffer)
#define BELOW(folder, path) below(folder, path, buffer)

#define OPEN(name, parameters, arguments, path)                    \
  int name parameters {                                            \
    char buffer[PATH];                                             \
    (void)buffer;                                                  \
    mode_t mode = 0;                                               \
    if (flags & (O_CREAT | O_TMPFILE)) {                           \
      va_list more;                                                \
      va_start(more, flags);                                       \
      mode = va_arg(more, mode_t);                                 \
      va_end(more);                                                \
    }                                                              \
    if (setting("FAIL_CALLS")) {                                   \
      if (fails("open", path)) return -1;                          \
      if ((flags & O_ACCMODE) == O_RDONLY) {                       \
        if (fails("open_to_read", path)) return -1;                \
      } else if (fails("open_to_write", path)) {                   \
        return -1;                                                 \
      }                                                            \
    }                                                              \
    return REAL(name) arguments;                                   \
  }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode), path)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), path)
OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), BELOW(folder, path))
OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), BELOW(folder, path))
CALL(FILE *, fopen, (const char *path, const char *mode), (path, mode), "open", path, NULL)
CALL(FILE *, fopen64, (const char *path, const char *mode), (path, mode), "open", path, NULL)

#define READ(name, parameters, arguments)                                           \
  ssize_t name parameters {                                                         \
    char buffer[PATH];                                                              \
    if (setting("FAIL_CALLS") && listed("read") && fails("read", FILE_OF(file)))    \
      return number("FAIL_SHORT", 0) ? 0 : -1;                                      \
    return REAL(name) arguments;                                                    \
  }
READ(read, (int file, void *data, size_t size), (file, data, size))
READ(pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
READ(pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
READ(readv, (int file, const struct iovec *parts, int count), (file, parts, count))
READ(preadv, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
READ(preadv64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))

#define WRITE(name, parameters, arguments)                                                       \
  ssize_t name parameters {                                                                      \
    char buffer[PATH];                                                                           \
    if (setting("FAIL_CALLS") && listed("write") && fails("write", FILE_OF(file))) return -1;    \
    return REAL(name) arguments;                                                                 \
  }
WRITE(write, (int file, const void *data, size_t size), (file, data, size))
WRITE(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITE(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRITE(writev, (int file, const struct iovec *parts, int count), (file, parts, count))
WRITE(pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
WRITE(pwritev64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))

CALL(int, fsync, (int file), (file), "fsync", FILE_OF(file), -1)
CALL(int, fdatasync, (int file), (file), "fsync", FILE_OF(file), -1)
CALL(int, ftruncate, (int file, off_t size), (file, size), "truncate", FILE_OF(file), -1)
CALL(int, ftruncate64, (int file, off64_t size), (file, size), "truncate", FILE_OF(file), -1)
CALL(int, truncate, (const char *path, off_t size), (path, size), "truncate", path, -1)
CALL(int, flock, (int file, int operation), (file, operation), "flock", FILE_OF(file), -1)
CALL(void *, mmap, (void *at, size_t size, int access, int flags, int file, off_t from), (at, size, access, flags, file, from),
     "mmap", file < 0 ? NULL : FILE_OF(file), MAP_FAILED)
CALL(void *, mmap64, (void *at, size_t size, int access, int flags, int file, off64_t from),
     (at, size, access, flags, file, from), "mmap", file < 0 ? NULL : FILE_OF(file), MAP_FAILED)

// As on a network, the file is closed also where closing it fails.
int close(int file) {
  char buffer[PATH];
  if (setting("FAIL_CALLS") && listed("close") && fails("close", FILE_OF(file))) {
    int reason = errno;
    REAL(close)(file);
    errno = reason;
    return -1;
  }
  return REAL(close)(file);
}

CALL(int, rename, (const char *old, const char *new), (old, new), "rename", new, -1)
CALL(int, renameat, (int a, const char *old, int b, const char *new), (a, old, b, new), "rename", BELOW(b, new), -1)
CALL(int, renameat2, (int a, const char *old, int b, const char *new, unsigned how), (a, old, b, new, how), "rename",
     BELOW(b, new), -1)
CALL(int, link, (const char *old, const char *new), (old, new), "link", new, -1)
CALL(int, linkat, (int a, const char *old, int b, const char *new, int how), (a, old, b, new, how), "link", BELOW(b, new), -1)
CALL(int, mkdir, (const char *path, mode_t mode), (path, mode), "mkdir", path, -1)
CALL(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), "mkdir", BELOW(folder, path), -1)
CALL(int, unlink, (const char *path), (path), "unlink", path, -1)
CALL(int, rmdir, (const char *path), (path), "rmdir", path, -1)
CALL(int, unlinkat, (int folder, const char *path, int how), (folder, path, how), how & AT_REMOVEDIR ? "rmdir" : "unlink",
     BELOW(folder, path), -1)

CALL(DIR *, opendir, (const char *path), (path), "listdir", path, NULL)
CALL(DIR *, fdopendir, (int file), (file), "listdir", FILE_OF(file), NULL)
CALL(struct dirent *, readdir, (DIR *folder), (folder), "readdir", FILE_OF(dirfd(folder)), NULL)
CALL(struct dirent64 *, readdir64, (DIR *folder), (folder), "readdir", FILE_OF(dirfd(folder)), NULL)

CALL(int, stat, (const char *path, struct stat *found), (path, found), "stat", path, -1)
CALL(int, stat64, (const char *path, struct stat64 *found), (path, found), "stat", path, -1)
CALL(int, lstat, (const char *path, struct stat *found), (path, found), "stat", path, -1)
CALL(int, lstat64, (const char *path, struct stat64 *found), (path, found), "stat", path, -1)
CALL(int, fstat, (int file, struct stat *found), (file, found), "stat", FILE_OF(file), -1)
CALL(int, fstat64, (int file, struct stat64 *found), (file, found), "stat", FILE_OF(file), -1)
CALL(int, fstatat, (int folder, const char *path, struct stat *found, int how), (folder, path, found, how), "stat",
     BELOW(folder, path), -1)
CALL(int, fstatat64, (int folder, const char *path, struct stat64 *found, int how), (folder, path, found, how), "stat",
     BELOW(folder, path), -1)
CALL(int, statx, (int folder, const char *path, int how, unsigned mask, struct statx *found), (folder, path, how, mask, found),
     "stat", BELOW(folder, path), -1)
CALL(int, access, (const char *path, int mode), (path, mode), "stat", path, -1)
CALL(int, faccessat, (int folder, const char *path, int mode, int how), (folder, path, mode, how), "stat", BELOW(folder, path),
     -1)
