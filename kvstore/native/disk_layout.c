/* Lays out adjacent entries of the SSD tier's log as vectors: for each a header page, then its data.
 *
 * Called through ctypes. Addresses are not checked. The format is that of kvstore/disk/io/format.py, which reads it.
 */
#include <stddef.h>

#include "../../transfer/native/xxh3.h"

#define PUBLIC __attribute__((visibility("default")))

enum { PAGE = 4096, CHECKED_FROM = 16, OBJECT = 2, TAG_BYTES = 16, FOLDER_ID_BYTES = 16 };

typedef struct { /* followed by `body_bytes` bytes */
    uint64_t data, length;
    uint32_t page;
    uint16_t kind, body_bytes;
} Entry;

typedef struct __attribute__((packed)) {
    char magic[8];
    uint64_t checksum; /* of the bytes after it */
    uint16_t length;   /* of the bytes after `unused` */
    uint8_t kind, unused;
    uint8_t folder_id[FOLDER_ID_BYTES];
    uint32_t segment, page;
    uint8_t body[];
} Header;

typedef struct {
    uint8_t *address;
    uint64_t length;
} Vector;

static void fill_header(uint8_t *page, const Header *head, const Entry *entry, const uint8_t *body) {
    Header *header = (Header *)page;
    uint64_t tag_bytes = entry->kind == OBJECT ? TAG_BYTES : 0; /* without encryption zeros */
    uint64_t end = sizeof *header + entry->body_bytes + tag_bytes;
    *header = *head;
    header->kind = (uint8_t)entry->kind;
    header->page = entry->page;
    header->length = (uint16_t)(end - offsetof(Header, folder_id));
    memcpy(header->body, body, entry->body_bytes);
    memset(header->body + entry->body_bytes, 0, PAGE - sizeof *header - entry->body_bytes);
    header->checksum = xxh3(page + CHECKED_FROM, end - CHECKED_FROM);
}

/* `entries`: as `Entry`, back to back; `pages`: addresses of as many pages as headers and copied data need; `head`: the
 * header's bytes up to `page`. Whole pages of data that begin on a page are moved in place, other data is copied.
 * Returns the number of vectors. */
PUBLIC int32_t lay_out(const uint8_t *entries, int32_t count, const Header *head, uint8_t *const *pages,
                       Vector *vectors) {
    const Vector *first = vectors;
    for (; count; count--) {
        Entry entry;
        memcpy(&entry, entries, sizeof entry);
        fill_header(*pages, head, &entry, entries + sizeof entry);
        *vectors++ = (Vector){*pages++, PAGE};
        uint64_t in_place = entry.data % PAGE ? 0 : entry.length / PAGE * PAGE;
        const uint8_t *data = (const uint8_t *)(uintptr_t)entry.data + in_place;
        if (in_place) *vectors++ = (Vector){(uint8_t *)(uintptr_t)entry.data, in_place};
        for (uint64_t left = entry.length - in_place; left;) {
            uint64_t some = left < PAGE ? left : PAGE;
            memcpy(*pages, data, some);
            memset(*pages + some, 0, PAGE - some); /* no other data may reach the disk */
            *vectors++ = (Vector){*pages++, PAGE};
            data += some, left -= some;
        }
        entries += sizeof entry + entry.body_bytes;
    }
    return (int32_t)(vectors - first);
}
