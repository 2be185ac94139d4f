/* Counts, records and breaks what a process does to the files below one folder.
 *
 * To be preloaded (LD_PRELOAD); shim.py drives it from inside the process. It stands between the
 * process and libc, so it sees Python's own calls and those of SQLite alike, on every thread. A
 * lock is held over each call that it looks at: the order of the records is the order of the calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* The same numbers stand in shim.py. */
enum kind { OPEN, WRITE, SYNC, TRUNCATE, RENAME, UNLINK, LINK, MKDIR, READ, CLOSE, MARK, UNKNOWN, KINDS };
enum action { NOTHING, FAIL, FAIL_FROM_NOW_ON, KILL_BEFORE, KILL_AFTER, SHORT, DELAY };

#define DESCRIPTORS 65536

static char folder[4096], parent[4096], only[256];
static size_t folder_length;
static unsigned char watched[DESCRIPTORS]; /* 1: watched; 2: and its name has `only` in it */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long counts[KINDS], left;
static unsigned armed_kinds;
static int armed_action, argument, has_fired, log_descriptor = -1;

struct __attribute__((packed)) record {
    uint8_t kind;
    int32_t result, error, descriptor;
    int64_t offset, size;
    uint32_t first_length, second_length;
};

#define REAL(type, name, ...)                                   \
    static type (*real_##name)(__VA_ARGS__);                    \
    if (!real_##name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name)

static void record(enum kind kind, long result, int error, int descriptor, int64_t offset, int64_t size,
                   const void *first, size_t first_length, const void *second, size_t second_length) {
    if (log_descriptor < 0) return;
    REAL(ssize_t, write, int, const void *, size_t);
    struct record head = {kind, (int32_t)result, error, descriptor, offset, size,
                          (uint32_t)first_length, (uint32_t)second_length};
    size_t length = sizeof head + first_length + second_length;
    char *whole = malloc(length), *rest = whole;
    if (!whole) abort(); /* a record with a gap would prove nothing */
    memcpy(whole, &head, sizeof head);
    memcpy(whole + sizeof head, first, first_length);
    if (second_length) memcpy(whole + sizeof head + first_length, second, second_length);
    while (length) {
        ssize_t written = real_write(log_descriptor, rest, length);
        if (written <= 0) abort();
        rest += written;
        length -= (size_t)written;
    }
    free(whole);
}

/* What shim.py calls. */

void shim_watch(const char *path, const char *part) {
    pthread_mutex_lock(&mutex);
    strncpy(folder, path, sizeof folder - 1);
    strncpy(parent, path, sizeof parent - 1);
    strncpy(only, part, sizeof only - 1);
    only[strlen(part) < sizeof only ? strlen(part) : sizeof only - 1] = 0;
    folder_length = strlen(folder);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    memset(watched, 0, sizeof watched);
    pthread_mutex_unlock(&mutex);
}
void shim_arm(unsigned kinds, long nth, int action, int value) {
    pthread_mutex_lock(&mutex);
    memset(counts, 0, sizeof counts);
    armed_kinds = kinds;
    left = nth;
    armed_action = action;
    argument = value;
    has_fired = 0;
    pthread_mutex_unlock(&mutex);
}
long shim_count(unsigned kinds) {
    long sum = 0;
    for (int kind = 0; kind < KINDS; kind++)
        if (kinds >> kind & 1) sum += counts[kind];
    return sum;
}
int shim_fired(void) { return has_fired; }
void shim_log(int descriptor) { log_descriptor = descriptor; }
void shim_mark(const char *text) {
    pthread_mutex_lock(&mutex);
    record(MARK, 0, 0, -1, 0, 0, text, strlen(text), "", 0);
    pthread_mutex_unlock(&mutex);
}

static int is_watched(const char *path) {
    if (!folder_length || !path) return 0;
    if (!strcmp(path, parent)) return 1;
    return !strncmp(path, folder, folder_length) && (path[folder_length] == 0 || path[folder_length] == '/');
}
static int grade(const char *path) { return !*only || strstr(path, only) ? 2 : 1; }
static int grade_of(int descriptor) {
    return folder_length && descriptor >= 0 && descriptor < DESCRIPTORS ? watched[descriptor] : 0;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call, and say what is to be done with it. */
static enum action step(enum kind kind, int graded) {
    if (graded < 2) return NOTHING;
    counts[kind]++;
    if (armed_action == NOTHING || !(armed_kinds >> kind & 1)) return NOTHING;
    if (has_fired) return armed_action == FAIL_FROM_NOW_ON ? FAIL : NOTHING;
    if (--left > 0) return NOTHING;
    has_fired = 1;
    if (armed_action == KILL_BEFORE) die();
    if (armed_action == DELAY) { /* the calls of other threads go on meanwhile */
        pthread_mutex_unlock(&mutex);
        usleep((useconds_t)argument);
        pthread_mutex_lock(&mutex);
    }
    return armed_action == FAIL_FROM_NOW_ON ? FAIL : (enum action)armed_action;
}

#define BEGIN(kind, graded, call)                               \
    pthread_mutex_lock(&mutex);                                 \
    enum action act = step(kind, graded);                       \
    int error = 0;                                              \
    long result = -1;                                           \
    if (act == FAIL) error = argument;                          \
    else if ((result = (call)) < 0) error = errno

#define END                                                     \
    if (act == KILL_AFTER) die();                               \
    pthread_mutex_unlock(&mutex);                               \
    if (result < 0) errno = error;                              \
    return result

static int watched_open(int at, const char *path, int flags, mode_t mode) {
    REAL(int, openat64, int, const char *, int, ...);
    if (!is_watched(path)) {
        int descriptor = real_openat64(at, path, flags, mode);
        if (descriptor >= 0 && descriptor < DESCRIPTORS) watched[descriptor] = 0;
        return descriptor;
    }
    BEGIN(OPEN, grade(path), real_openat64(at, path, flags, mode));
    if (result >= 0 && result < DESCRIPTORS) watched[result] = (unsigned char)grade(path);
    record(OPEN, result, error, (int)result, 0, flags, path, strlen(path), "", 0);
    END;
}
#define MODE                                                    \
    mode_t mode = 0;                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                        \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode = va_arg(more, mode_t);                            \
        va_end(more);                                           \
    }
int open(const char *path, int flags, ...) { MODE return watched_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return watched_open(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE return watched_open(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE return watched_open(at, path, flags, mode); }
int __open_2(const char *path, int flags) { return watched_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return watched_open(AT_FDCWD, path, flags, 0); }

int close(int descriptor) {
    REAL(int, close, int);
    int graded = grade_of(descriptor);
    if (!graded) return real_close(descriptor);
    BEGIN(CLOSE, graded, real_close(descriptor));
    if (result >= 0) watched[descriptor] = 0;
    record(CLOSE, result, error, descriptor, 0, 0, "", 0, "", 0);
    END;
}

/* `offset` -1: at the place of the descriptor. */
static ssize_t watched_write(int descriptor, const void *bytes, size_t count, int64_t offset) {
    REAL(ssize_t, write, int, const void *, size_t);
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    int graded = grade_of(descriptor);
    int64_t place = graded && offset < 0 ? lseek64(descriptor, 0, SEEK_CUR) : offset;
    size_t taken = count;
#define DO (offset < 0 ? real_write(descriptor, bytes, taken) : real_pwrite64(descriptor, bytes, taken, offset))
    if (!graded) return DO;
    pthread_mutex_lock(&mutex);
    enum action act = step(WRITE, graded);
    int error = 0;
    long result = -1;
    if (act == SHORT && (size_t)argument < count) taken = (size_t)argument;
    if (act == FAIL) error = argument;
    else if ((result = DO) < 0) error = errno;
    record(WRITE, result, error, descriptor, place, (int64_t)count, bytes, result > 0 ? (size_t)result : 0, "", 0);
    END;
#undef DO
}
ssize_t write(int descriptor, const void *bytes, size_t count) { return watched_write(descriptor, bytes, count, -1); }
ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t offset) {
    return watched_write(descriptor, bytes, count, offset);
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
    return watched_write(descriptor, bytes, count, offset);
}

#define SYNCING(name)                                           \
    int name(int descriptor) {                                  \
        REAL(int, name, int);                                   \
        int graded = grade_of(descriptor);                      \
        if (!graded) return real_##name(descriptor);            \
        BEGIN(SYNC, graded, real_##name(descriptor));           \
        record(SYNC, result, error, descriptor, 0, 0, "", 0, "", 0); \
        END;                                                    \
    }
SYNCING(fsync)
SYNCING(fdatasync)

#define TRUNCATING(name, type)                                  \
    int name(int descriptor, type size) {                       \
        REAL(int, name, int, type);                             \
        int graded = grade_of(descriptor);                      \
        if (!graded) return real_##name(descriptor, size);      \
        BEGIN(TRUNCATE, graded, real_##name(descriptor, size)); \
        record(TRUNCATE, result, error, descriptor, 0, size, "", 0, "", 0); \
        END;                                                    \
    }
TRUNCATING(ftruncate, off_t)
TRUNCATING(ftruncate64, off64_t)

#define ABOUT(kind, path, call)                                 \
    BEGIN(kind, grade(path), call);                             \
    record(kind, result, error, -1, 0, 0, path, strlen(path), "", 0); \
    END
#define ABOUT_TWO(kind, from, to, call)                         \
    BEGIN(kind, grade(to), call);                               \
    record(kind, result, error, -1, 0, 0, from, strlen(from), to, strlen(to)); \
    END

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    if (!is_watched(from) && !is_watched(to)) return real_rename(from, to);
    ABOUT_TWO(RENAME, from, to, real_rename(from, to));
}
int renameat(int from_at, const char *from, int to_at, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    if (!is_watched(from) && !is_watched(to)) return real_renameat(from_at, from, to_at, to);
    ABOUT_TWO(RENAME, from, to, real_renameat(from_at, from, to_at, to));
}
int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    if (!is_watched(to)) return real_link(from, to);
    ABOUT_TWO(LINK, from, to, real_link(from, to));
}
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    if (!is_watched(to)) return real_linkat(from_at, from, to_at, to, flags);
    ABOUT_TWO(LINK, from, to, real_linkat(from_at, from, to_at, to, flags));
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    if (!is_watched(path)) return real_unlink(path);
    ABOUT(UNLINK, path, real_unlink(path));
}
int unlinkat(int at, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    if (!is_watched(path)) return real_unlinkat(at, path, flags);
    ABOUT(UNLINK, path, real_unlinkat(at, path, flags));
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    if (!is_watched(path)) return real_rmdir(path);
    ABOUT(UNLINK, path, real_rmdir(path));
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    if (!is_watched(path)) return real_mkdir(path, mode);
    ABOUT(MKDIR, path, real_mkdir(path, mode));
}
int mkdirat(int at, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    if (!is_watched(path)) return real_mkdirat(at, path, mode);
    ABOUT(MKDIR, path, real_mkdirat(at, path, mode));
}

ssize_t read(int descriptor, void *bytes, size_t count) {
    REAL(ssize_t, read, int, void *, size_t);
    int graded = grade_of(descriptor);
    if (!graded) return real_read(descriptor, bytes, count);
    BEGIN(READ, graded, real_read(descriptor, bytes, count));
    END;
}
ssize_t pread64(int descriptor, void *bytes, size_t count, off64_t offset) {
    REAL(ssize_t, pread64, int, void *, size_t, off64_t);
    int graded = grade_of(descriptor);
    if (!graded) return real_pread64(descriptor, bytes, count, offset);
    BEGIN(READ, graded, real_pread64(descriptor, bytes, count, offset));
    END;
}

/* Calls that are not followed: whoever reads the log must not go on when it has one. */
#define UNFOLLOWED(name, descriptor) \
    if (grade_of(descriptor)) record(UNKNOWN, 0, 0, descriptor, 0, 0, #name, sizeof #name - 1, "", 0)
ssize_t writev(int descriptor, const struct iovec *pieces, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    UNFOLLOWED(writev, descriptor);
    return real_writev(descriptor, pieces, count);
}
int fallocate64(int descriptor, int mode, off64_t offset, off64_t length) {
    REAL(int, fallocate64, int, int, off64_t, off64_t);
    UNFOLLOWED(fallocate64, descriptor);
    return real_fallocate64(descriptor, mode, offset, length);
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t length) {
    REAL(int, posix_fallocate64, int, off64_t, off64_t);
    UNFOLLOWED(posix_fallocate64, descriptor);
    return real_posix_fallocate64(descriptor, offset, length);
}
ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t length, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    UNFOLLOWED(copy_file_range, out);
    return real_copy_file_range(in, in_offset, out, out_offset, length, flags);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    REAL(ssize_t, sendfile64, int, int, off64_t *, size_t);
    UNFOLLOWED(sendfile64, out);
    return real_sendfile64(out, in, offset, count);
}
