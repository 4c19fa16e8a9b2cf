/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lab_devices.c: what UCCL_EP_LAB may say, what comes of it, and the texts where it is wrong.
 */
#include "lab_plane.h"

static void refused(const char *spec, const char *part) {
    char text[256] = "";
    uint32_t n = 99;
    CHECK(!lab_devices_parse(spec, &n, text), "'%s' is taken", spec);
    CHECK_EQ(n, 0);
    CHECK(strstr(text, part), "'%s': '%s' does not name '%s'", spec, text, part);
    CHECK(strlen(text) < 255, "'%s': the text is cut", spec);
}

int main(int argc, char **argv) {
    test_begin(argc, argv, 60);
    char text[256];
    uint32_t n;
    lab_device *d =
        lab_devices_parse("nic=connectx,count=2,seed=7,fabric=a-b_c.1,max_sge=3;nic=connectx,variant=cx6", &n, text);
    CHECK(d, "%s", text);
    CHECK_EQ(n, 3);
    CHECK(!strcmp(d[0].name, "mlx5_0") && !strcmp(d[2].name, "mlx5_2"), "names");
    CHECK(!strcmp(d[0].variant->name, "cx7") && !strcmp(d[2].variant->name, "cx6"), "variants");
    CHECK_EQ(d[1].knobs.max_sge, 3);
    CHECK_EQ(d[2].knobs.max_sge, 30);
    CHECK_EQ(d[2].seed, 7); /* the first one's is everybody's */
    CHECK(!strcmp(d[2].fabric, "a-b_c.1"), "fabric");
    CHECK(d[0].guid != d[1].guid && memcmp(&d[0].gid[1], &d[1].gid[1], 16), "two NICs of one address");
    CHECK_EQ(d[0].gids, 2);
    CHECK(IN6_IS_ADDR_LINKLOCAL(&d[0].gid[0]) && IN6_IS_ADDR_V4MAPPED(&d[0].gid[1]), "GIDs");
    free(d);
    d = lab_devices_parse("nic=connectx,profile=connectx-ro,order_write_write=0", &n, text);
    CHECK(d && n == 1 && d->knobs.relaxed, "%s", text);
    free(d);
    refused("", "nic=NAME");
    refused(";;", "nic=NAME");
    refused("nic=infinihost", "connectx");
    refused("nic=connectx,variant=cx1", "cx7");
    refused("nic=connectx,profile=none", "connectx-ro");
    refused("nic=connectx,count=0", "1 to 8");
    refused("nic=connectx,count=9", "1 to 8");
    refused("nic=connectx,count=8;nic=connectx", "at most 8");
    refused("nic=connectx,seed=x", "number");
    refused("nic=connectx,fabric=../x", "letters");
    refused("nic=connectx,fabric=", "letters");
    refused("nic=connectx,max_sgee=3", "max_sge");
    refused("nic=connectx,max_sge", "key=value");
    /* Limits that a NIC could not keep. */
    refused("nic=connectx,max_batch=8", "max_batch=8");
    refused("nic=efa,max_batch=8", "doorbells of nic=efa are memory");
    refused("nic=connectx,count", "key=value");
    test_rng rng = test_rng_at(0);
    static const char *const words[] = {"nic=", "connectx", "count=", ",",     ";",      "=",
                                        "9",    "profile=", "efa",    "seed=", "max_wr="};
    for (uint64_t i = 0; i < test_scaled(20000); i++) {
        char spec[512] = "";
        for (uint64_t k = test_below(&rng, 12); k--;)
            strcat(spec, words[test_below(&rng, sizeof words / sizeof *words)]);
        memset(text, 0, sizeof text);
        d = lab_devices_parse(spec, &n, text);
        CHECK(d ? n && n <= LAB_MAX_DEVICES : !n && *text, "'%s': %u '%s'", spec, n, text);
        free(d);
    }
    return test_end();
}
